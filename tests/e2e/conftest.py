"""The `tepo` command as a user runs it, with a base model that solves some problems and not others."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.tiny import tiny_qwen3

ROOT = Path(__file__).parents[2]
MARK = "TEPO_TEST_MARK"
PATIENCE = 3  # time-outs are those of a machine with nothing else to do

BUILD = """
import sys
from pathlib import Path
from examples.arithmetic.base_model import Settings, build
settings = Settings(seed=3, model=sys.argv[2], skill=0.2, hasty_steps=0, train_problems=256, eval_problems=32)
build(Path(sys.argv[1]), settings)
"""


@dataclass
class Command:
    """A running `tepo` command, in a process group of its own; `mark` is in the environment of all its descendants."""

    process: subprocess.Popen[str]
    mark: str
    log: Path

    def wait(self, timeout: float) -> int:
        """Return the exit status. Raise AssertionError with the output after PATIENCE times `timeout` seconds."""
        try:
            return self.process.wait(PATIENCE * timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {PATIENCE * timeout:.0f} s:\n{self.output}") from None

    @property
    def output(self) -> str:
        """The output so far, stdout and stderr."""
        return self.log.read_text()

    def until(self, condition: Callable[[], bool], timeout: float) -> None:
        """Wait until a condition holds while the command runs; fail as `wait` does."""
        deadline = time.monotonic() + PATIENCE * timeout
        while not condition():
            assert self.process.poll() is None, f"ended with status {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"not within {PATIENCE * timeout:.0f} s:\n{self.output}"
            time.sleep(0.1)

    @contextmanager
    def stopped_when(self, condition: Callable[[], bool], timeout: float) -> Iterator[None]:
        """Stop all processes of the command at a moment at which a condition holds, and continue them after the block.

        The condition holds during the whole block, on a busy machine too. It fails as `until` does.
        """
        deadline, held = time.monotonic() + timeout, False
        while not held:
            self.until(condition, deadline - time.monotonic())
            stopped = [int(line.split()[0]) for line in self.left_over()]
            self._signal(stopped, signal.SIGSTOP)
            try:
                if held := condition():
                    yield
            finally:
                self._signal(stopped, signal.SIGCONT)

    @staticmethod
    def _signal(pids: Sequence[int], signum: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def oldest_server(self, word: str) -> int:
        """Return the process that was started first among those with `word` in their command line, guards excluded.

        This is the server that has served longest, not one of its workers. Process ids say nothing about age, since they wrap
        around.
        """
        found = [int(line.split()[0]) for line in self.left_over() if word in line and "guard" not in line]
        return min(found, key=lambda pid: psutil.Process(pid).create_time())

    def left_over(self) -> list[str]:
        """Return the command lines of its descendants that still run."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes():
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if line:  # a zombie has none
                        found.append(f"{folder.name} {line}")
            except OSError:
                continue
        return found

    def ready_urls(self) -> list[str]:
        """Return the URL of each start of a server that `tepo serve` has told of, in order."""
        return re.findall(r"is ready: (\S+)", self.output)

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, sorted."""
        return sorted(int(line.split()[0]) for line in self.left_over() if "tepo_megatron.trainer.worker" in line)

    def service(self) -> int:
        """Return the process id of the rollout service, without its graders and servers."""
        service = re.compile(r"-m (tepo_megatron\.service\.service|tests\.e2e\.scripted_service)")
        (pid,) = (int(line.split()[0]) for line in self.left_over() if service.search(line))
        return pid

    def assert_nothing_left(self, within: float = 30.0) -> None:
        """Assert that no descendant outlives the command by more than `within` seconds."""
        deadline = time.monotonic() + within
        while left := self.left_over():
            assert time.monotonic() < deadline, "\n".join(left)
            time.sleep(0.1)


@contextmanager
def commands(folder: Path) -> Iterator[Callable[..., Command]]:
    """Start `tepo WORDS...`, with the engine of scripted_service.py if one is named; kill what still runs at the end.

    `start` takes, besides the words: engine, the behaviour of the scripted engine; env, further variables; by, the arguments
    that start the module, instead of this Python; module, another one that takes the words.
    """
    started: list[Command] = []

    def start(
        *words: str | Path,
        engine: str | None = None,
        env: Mapping[str, str] | None = None,
        by: Sequence[str] = (),
        module: str | None = None,
    ) -> Command:
        mark = uuid.uuid4().hex
        plain = engine is None and not by and module is None
        module = module or ("tepo_megatron" if engine is None else "tests.e2e.scripted_run")
        program = [Path(sys.executable).parent / "tepo"] if plain else [*(by or [sys.executable]), "-m", module]
        log = folder / f"output-{len(started)}.txt"
        process = subprocess.Popen(
            [*program, *words],
            cwd=ROOT, env={**os.environ, **(env or {}), MARK: mark, "TEPO_TEST_ENGINE": engine or ""},
            stdin=subprocess.DEVNULL, stdout=log.open("w"), stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(Command(process, mark, log))
        return started[-1]

    try:
        yield start
    finally:
        for command in started:
            for line in command.left_over():
                with suppress(ProcessLookupError):  # it ended together with one that was killed before
                    os.kill(int(line.split()[0]), signal.SIGKILL)
            command.process.wait(60)


@pytest.fixture
def tepo(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """See `commands`."""
    with commands(tmp_path) as start:
        yield start


@pytest.fixture(scope="session")
def base() -> Path:
    """A base model that solves a fifth of the problems, with its datasets. It is built once for a checkout and its source."""
    return built_base("qwen3")


@pytest.fixture(scope="session")
def hybrid_base() -> Path:
    """The same for a hybrid (Qwen3.5)."""
    return built_base("qwen3_5")


def built_base(model: str) -> Path:
    """Build the base model of a family, or re-use it."""
    out = ROOT / ".cache" / "tests" / ("base-model" if model == "qwen3" else f"base-model-{model}")
    subprocess.run([sys.executable, "-c", BUILD, out, model], cwd=ROOT, check=True, timeout=900, stdout=subprocess.DEVNULL)
    return out


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, with datasets: for what a run does around the model."""
    return write_model(tmp_path_factory.mktemp("random") / "model")


def write_model(path: Path, layers: int = 2, problems: int = 40) -> Path:
    """Write a model with random weights and its datasets."""
    tiny_qwen3(path, layers=layers)
    rows = "".join(json.dumps({"prompt": f"1+{i}?\n", "answer": str(1 + i)}) + "\n" for i in range(problems))
    for name in ("train.jsonl", "eval.jsonl"):
        (path / name).write_text(rows)
    return path


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[..., list[str]]:
    """`train examples/demo.yaml` on a model directory, with a run directory under tmp_path, and more overrides."""

    def build(model: Path, **overrides: object) -> list[str]:
        return ["train", "examples/demo.yaml", *settings(model, output=tmp_path / "runs", **overrides)]

    return build


def settings(model: Path, **overrides: object) -> list[str]:
    """Return command-line arguments for a model with its problems."""
    keys = {"model.path": model, "data.train": model / "train.jsonl", "data.eval": model / "eval.jsonl"}
    keys |= {k.replace("__", "."): v for k, v in overrides.items()}
    return [word for k, v in keys.items() for word in (f"--{k}", str(v))]
