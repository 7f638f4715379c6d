"""A test that hangs ends, with its processes; what fails once is flaky; a run says so, and leaves nothing behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = """
[tool.pytest.ini_options]
addopts = "-q -p xdist.plugin -p pytest_timeout -p tests.running.limits -p tests.running.results -p no:cacheprovider"
markers = ["server", "e2e"]
"""
HANGS = """
import ctypes, os, subprocess, time
from pathlib import Path
import pytest
from tepo_megatron.base.processes import read_stat

@pytest.fixture(scope="module")
def server():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()

@pytest.fixture
def slow_end():
    yield
    in_the_teardown()

def in_the_teardown():
    time.sleep(600)

@pytest.mark.timeout(2)
def test_teardown(server, slow_end):
    pass

def in_the_child():
    time.sleep(600)
    os._exit(0)

def start_child():
    child = os.fork()  # at once in its place, however slowly programs start here
    if not child:
        os.setsid()
        in_the_child()
    Path("child").write_text(str(child))
    return child

@pytest.mark.timeout(4)
def test_child(server):
    os.waitpid(start_child(), 0)

def gone():
    if not Path("child").exists():
        return True  # a busy machine kills the first worker, whose other tests then come last
    deadline = time.monotonic() + 60  # a killed process ends when it gets processor time
    while (process := read_stat(int(Path("child").read_text()))) is not None and process.state != "Z":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True

def test_others_go_on(server):
    assert server.poll() is None and gone()

def in_c():
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # waits for itself, with the GIL

@pytest.mark.timeout(2)
def test_c(server):
    start_child()
    in_c()

def test_the_next_worker_goes_on(server):
    assert server.poll() is None and gone()
"""
FLAKY = """
from pathlib import Path
import pytest

def once(name):
    if not Path(name).exists():
        Path(name).touch()
        print("printed the first time")
        raise ValueError("fails the first time")
"""
SERVER = "@pytest.mark.server\ndef test_{0}():\n    {1}\n"
ONE, TWO, THREE, FOUR = (SERVER.format(name, f"once('{name}')") for name in ("one", "two", "three", "four"))
ALWAYS = SERVER.format("always", "raise ValueError('fails always')")


def run(folder: Path, *args: str) -> subprocess.Popen[str]:
    (folder / "pyproject.toml").write_text(SETTINGS)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {"PYTHONPATH": str(ROOT)}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half of pytest's start is those of other packages
    words = [sys.executable, "-m", "tests.running", "--progress", "1", *args]
    return subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_what_hangs_fails_with_its_stacks_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    with run(tmp_path, "--stream", "hangs", "-n 1 test_hangs.py") as process:
        printed, _ = process.communicate()
    assert process.returncode == 1
    # the test whose teardown hangs has failed, although its own part passed
    assert printed.splitlines()[-1] == "2 passed, 3 failed, 0 skipped, 0 flaky", printed
    assert re.search(r"^ +\d+ s: hangs \d/5.* s in test_hangs.py::test_", printed, re.MULTILINE)
    output = (tmp_path / "build/streams/hangs.txt").read_text()
    for function in ("in_the_teardown", "in_the_child", "in_c"):
        assert re.search(rf"^    {function} \(", output, re.MULTILINE)
    assert "sleep 600" in output, "the command of a process without Python"


ENDS_EARLY = "def test_passes():\n    pass\ndef test_ends():\n    import os; os._exit(0)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "status", "counts"),
    [
        ((ONE + TWO, "def test_one():\n    pytest.skip()\ndef test_two():\n    pass\n"), 0, (1, 0, 1, 2)),
        ((ONE + TWO, THREE), 1, (0, 0, 0, 3)),
        ((ONE + TWO + THREE + FOUR,), 1, (0, 1, 0, 3)),
        ((ONE + ALWAYS + TWO, "def test_five():\n    once('five')\n"), 1, (0, 3, 0, 1)),
        (("import nothing_of_this_name\n", ENDS_EARLY), 1, (1, 2, 0, 0)),
    ],
    ids=["two-flaky", "three-flaky", "no-more-repeats", "fails-again", "ends-early"],
)
def test_results_of_all_streams_are_one_line(
    streams: tuple[str, ...], status: int, counts: tuple[int, ...], tmp_path: Path
) -> None:
    args = []
    for number, tests in enumerate(streams):
        (tmp_path / f"test_{number}.py").write_text(FLAKY + tests)
        args += ["--then" if number else "--stream", str(number), f"-n 0 test_{number}.py"]
    with run(tmp_path, *args) as process:
        printed, _ = process.communicate()
    assert printed.splitlines()[-1] == "{} passed, {} failed, {} skipped, {} flaky".format(*counts), printed
    assert process.returncode == status
    kept = list(tmp_path.glob("build/flaky/*"))
    assert len(kept) == len(re.findall("^FLAKY ", printed, re.MULTILINE)) == counts[-1]
    for words in ("printed the first time", "fails the first time", "1 passed"):
        assert all(words in file.read_text() for file in kept)
