"""Whole runs with an agent in the environments of other sites: proxies, no names, no home, odd paths, little of everything."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Command, settings
from tests.hosts import PATH
from tests.hurting import control_group
from tests.recorded import step_records

pytestmark = [pytest.mark.server, pytest.mark.e2e]
STEPS = 2
DEAD = "http://127.0.0.1:9"  # nothing listens on this port


@dataclass
class Site:
    """The conditions of a site under which a run starts.

    Attributes:
        root: Path under which the run sees this checkout.
        variables: Environment variables to set; None: to remove.
        outside: Shell commands as root, in network, host-name and mount namespaces of the run's own; they need root.
        inside: Shell commands of the run's own process.
    """

    folder: Path
    stack: ExitStack
    root: Path = ROOT
    variables: dict[str, str | None] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    by: list[str] = field(default_factory=list)
    name: str = "run"

    def words(self) -> list[str]:
        """Return the words that start Python in this site; a command's own words follow."""
        unset = [word for name, value in self.variables.items() if value is None for word in ("-u", name)]
        words = ["sh", "-c", " && ".join([*self.inside, f'cd "{self.root}"', 'exec "$@"']), "sh"]
        words += [*self.by, "env", *unset, f"{self.root}/.venv/bin/python"]
        if self.outside:
            enter = " && ".join(['export PATH="$0"', "ip link set lo up", *self.outside, 'exec "$@"'])
            words = ["unshare", "--net", "--uts", "--mount", "sh", "-c", enter, PATH, *words]
        return words


def proxies(site: Site) -> None:
    names = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    site.variables |= dict.fromkeys(names, DEAD) | dict.fromkeys(("no_proxy", "NO_PROXY"))


def long_tmpdir(site: Site) -> None:
    folder = Path(site.stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
    folder /= "t" * (140 - len(str(folder)) - 1)
    folder.mkdir()
    site.variables["TMPDIR"] = str(folder)


def no_names(site: Site) -> None:
    (site.folder / "hosts").write_text("127.0.0.1 localhost\n")
    (site.folder / "resolv.conf").touch()
    binds = [f'mount --bind "{site.folder}/{name}" /etc/{name}' for name in ("hosts", "resolv.conf")]
    site.outside += ["hostname nobody-knows", *binds]


def homeless(site: Site) -> None:
    site.variables |= dict.fromkeys(("HOME", "USER", "LOGNAME", "XDG_CACHE_HOME"))


def nobody(site: Site) -> None:
    site.by += ["unshare", "--user", "--map-user=12345", "--map-group=12345"]


def plain_locale(site: Site) -> None:
    site.variables |= {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": None, "PYTHONIOENCODING": None}
    site.name = "übung-数"


def odd_paths(site: Site) -> None:
    site.root = site.folder / "a träger of spaces"
    site.root.mkdir()
    site.outside += [f'mount --bind "{ROOT}" "{site.root}"']


def small_shm(site: Site) -> None:
    site.outside += ["mount -t tmpfs -o size=64m tmpfs /dev/shm"]


def few_files(site: Site) -> None:
    site.inside += ["ulimit -n 256"]


def one_core(site: Site) -> None:
    site.by += ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]


def quota(site: Site) -> None:
    limits = {"cgroup": {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"}, "cgroup2": {"cpu.max": "100000 100000"}}
    group = site.stack.enter_context(control_group("cpu", limits))
    site.inside += [f"echo $$ > {group.folder}/cgroup.procs"]


ALONE = (proxies, long_tmpdir, no_names, homeless, nobody, plain_locale, odd_paths, small_shm, few_files, one_core, quota)
TOGETHER = tuple(condition for condition in ALONE if condition is not quota)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    with ExitStack() as stack:
        yield Site(folder, stack)


@pytest.mark.parametrize(
    "conditions",
    [
        pytest.param(TOGETHER, id="all"),
        *(pytest.param((each,), id=each.__name__, marks=pytest.mark.full) for each in ALONE),
    ],
)
def test_an_agent_learns_in_any_environment(
    tepo: Callable[..., Command], base: Path, site: Site, conditions: Sequence[Callable[[Site], None]]
) -> None:
    for condition in conditions:
        condition(site)
    if site.outside or nobody in conditions:
        needed = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True)
        if needed.returncode:
            pytest.skip(f"no namespaces: {needed.stderr.strip()}")
    outputs = site.folder / "runs of ü" if odd_paths in conditions else site.folder / "runs"
    keys = {
        "output": outputs, "name": site.name, "training__steps": STEPS, "rollout__prompts_per_step": 8,
        "training__minibatch_prompts": 4, "evaluation__max_problems": 8, "rollout__filter_uniform_groups": "false",
        "rollout__server__kv_cache_gib": 0.25,
    }  # fmt: skip
    env = {name: value for name, value in site.variables.items() if value is not None}
    words = ["train", "examples/agents/calculator.yaml", *settings(base, **keys)]
    command = tepo(*words, by=site.words(), env=env)
    assert command.wait(240) == 0, command.output
    command.assert_nothing_left()
    run = outputs / site.name
    records = step_records(run)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    lost = [record[f"rollout/samples_{kind}"] for record in records for kind in ("raised", "timed_out", "over_limit")]
    assert not any(lost) and "lost" not in command.output, command.output
    assert not (ROOT / "~").exists() and not list(Path(env.get("TMPDIR", site.folder)).glob("tepo-*"))


def test_the_conditions_hold(site: Site) -> None:
    """Without this a case could pass because its condition was never there."""
    if shutil.which("unshare") is None or os.geteuid():
        pytest.skip("needs root")
    for condition in TOGETHER:
        condition(site)
    code = """
import json, os, resource, shutil, socket, tempfile
def resolves(name):
    try:
        return bool(socket.getaddrinfo(name, 80))
    except OSError:
        return False
names = [resolves(socket.gethostname()), resolves("example.org"), os.getuid(), "HOME" in os.environ, os.getcwd()]
files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
little = [shutil.disk_usage("/dev/shm").total, files, len(os.sched_getaffinity(0)), len(tempfile.gettempdir())]
print(json.dumps([*names, *little, os.environ["HTTP_PROXY"], os.environ["LANG"]]))
"""
    env = {name: value for name, value in site.variables.items() if value is not None}
    done = subprocess.run([*site.words(), "-c", code], env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, False, 12345, False, str(site.root), 64 << 20, 256, 1, 140, DEAD, "C"]
