"""`--executor skypilot`: the whole task that SkyPilot would get, and what is refused before."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import bootstrap
from launch.executors import skypilot
from launch.layout import lay_out
from launch.profile import Cluster
from launch.sections import NodeCheckConfig
from tepo_megatron.config.io import validate, validate_as
from tepo_megatron.errors import ConfigError
from tests.launch import cases
from tests.launch import skypilot_cases as sky

missing = pytest.mark.skipif(not sky.PYTHON.exists(), reason=sky.WHY_NOT)
VOLUME = ["run.yaml", "--cluster", "volume.yaml"]
REFUSED = {
    "no git": (
        VOLUME,
        "/project is in no git repository, and NeMo-Run sends the commit HEAD of one; call launch in a checkout",
    ),
    "machines": (
        ["run.yaml", "--cluster", "bucket.yaml", "--model.path", "/models/a", *sky.APART],
        "takes 4 machines with one",
    ),
    "after": ([*VOLUME, "--after", "before"], "--after: SkyPilot's managed jobs do not wait for each other"),
    "store": (["run.yaml", "--cluster", "store.yaml", "--dry-run"], "SkyPilot refuses the task: Invalid storage YAML"),
    "accelerator": (["run.yaml", "--cluster", "infra.yaml", "--dry-run"], "SkyPilot refuses the task: "),
}
READ = "import sys, sky; print(*(sky.Task.from_yaml_str(text).num_nodes for text in sys.stdin.read().split('====')))"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Return the result of each call, and as "left" the files that the dry runs left."""
    folder = tmp_path_factory.mktemp("project")
    home = {path: path.stat().st_mtime_ns for path in (Path.home() / ".sky").rglob("*")}
    dry = sky.dry_runs(folder)
    assert home == {path: path.stat().st_mtime_ns for path in (Path.home() / ".sky").rglob("*")}
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    for name, change in {"store": {"storage": {"/s": {"name": "b", "store": "floppy"}}}, "infra": {"infra": "moon/1"}}.items():
        keys = sky.SKYPILOT | {"volumes": {"/shared": "lab"}} | change
        (folder / f"{name}.yaml").write_text(json.dumps(sky.CLUSTER | {"skypilot": keys}))
    (folder / "before" / "launch").mkdir(parents=True)
    return {**dry, **sky.call(folder, {name: words for name, (words, _) in REFUSED.items()}), "left": (0, "\n".join(left), "")}


@pytest.mark.full
@missing
@pytest.mark.parametrize("case", sky.CASES)
def test_the_task_equals_the_golden_file(results: dict[str, tuple[int, str, str]], case: str, tmp_path: Path) -> None:
    status, text, said = results[case]
    assert status == 0 and said == f"launch: warning: {REFUSED['no git'][1]}\n"
    assert text == (cases.GOLDEN / f"{case}.txt").read_text()
    assert cases.SECRET not in text and "WANDB_API_KEY: <redacted>" in text
    for i, script in enumerate(text.split("#==== ")[2:]):
        file = tmp_path / f"{i}.sh"
        file.write_text(script.partition("\n")[2])
        subprocess.run(["bash", "-n", file], check=True)


@pytest.mark.full
@missing
def test_skypilot_reads_the_tasks(tmp_path: Path) -> None:
    tasks = [(cases.GOLDEN / f"{case}.txt").read_text().split("#==== ")[1].partition("\n")[2] for case in sky.CASES]
    environment = {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "PATH": "/usr/bin:/bin"}
    words = [sky.PYTHON, "-W", "ignore", "-c", READ]
    done = subprocess.run(
        words, input="====".join(tasks), env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["1", "4", "2"], done.stderr


@pytest.mark.full
@missing
def test_a_dry_run_leaves_nothing(results: dict[str, tuple[int, str, str]]) -> None:
    assert results["left"][1].split("\n") == ["bucket.yaml", "run.yaml", "volume.yaml"]


@pytest.mark.full
@missing
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_in_one_line(results: dict[str, tuple[int, str, str]], case: str) -> None:
    status, _, error = results[case]
    error = "".join(line for line in error.splitlines(keepends=True) if not line.startswith("launch: warning: "))
    assert status == 1 and error.startswith("launch: error: ") and error.count("\n") == 1
    assert REFUSED[case][1] in error and cases.SECRET not in error


def test_a_missing_skypilot_is_named(tmp_path: Path) -> None:
    sky.prepare(tmp_path)
    words = [*VOLUME, "--executor", "skypilot", "--dry-run"]
    status, _, error = cases.call(tmp_path, {"it": words})["it"]
    assert status == 1 and "launch: error: sky is not installed here; `make launch-sky` makes .venv-sky" in error


def cluster(**keys: Any) -> Cluster:
    return validate_as(Cluster, {"gpus_per_node": 8, "skypilot": sky.SKYPILOT | keys}, "cluster.yaml")


def on_a_volume(**keys: Any) -> Cluster:
    return cluster(volumes={"/shared": "lab"}, **keys)


def on_a_bucket(mode: str = "MOUNT_CACHED", **keys: Any) -> Cluster:
    return cluster(storage={"/shared": {"name": "b", "mode": mode}, **keys})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, r"workdir=/shared/me is on the machine's own disk, which is lost with it, and holds the runs; put it below"),
        ({"storage": {"/shared": {"name": "b", "mode": "MOUNT"}}}, r"workdir=/shared/me is on a bucket of mode MOUNT"),
        ({"storage": {"/shared": {"name": "b", "mode": "CACHED"}}}, r"skypilot\.storage\./shared\.mode: .*'MOUNT_CACHED'"),
        (
            {"storage": {"/shared": {"mode": "COPY"}}},
            r"give name, a bucket's, or source, the URL of one with a folder; not both",
        ),
        ({"volumes": {"shared": "lab"}}, r"'shared' is no path for volumes, storage or workdir: absolute"),
        ({"workdir": "/nemo_run/me"}, r"'/nemo_run/me' is no path for"),
        (
            {"volumes": {"/shared": "a"}, "storage": {"/shared": {"name": "b"}}},
            r"/shared is given twice, by volumes and storage",
        ),
        ({"volumes": {"/shared": "lab"}, "gpu": None}, r"skypilot\.gpu=None and gpus_per_node=8 contradict each other"),
        ({"volumes": {"/shared": "lab"}, "memry": "8"}, r"skypilot\.memry: unknown key"),
    ],
)
def test_a_mistake_of_the_profile_is_reported_with_its_key_and_the_fix(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster(**keys)


APART = {
    "parallel": {"tp": 8, "dp": 2}, "rollout": {"servers": 8, "server": {"rendezvous": "r"}},
    "sync": {"transport": {"folder": "w"}},
}  # fmt: skip


def check(cluster: Cluster, **keys: Any) -> None:
    tree = {"name": "a", "model": {"path": "m"}, "data": {"train": "t"}, "checkpoint": {"every": 5}, "parallel": {"tp": 8}}
    cfg = validate(tree | {"rollout": {"colocate": True}} | keys)
    skypilot.check_run(cfg, cluster, lay_out(cfg, cluster))


def test_a_run_on_a_volume_or_a_bucket_is_accepted() -> None:
    check(on_a_volume())
    check(on_a_bucket())
    check(on_a_volume(), **APART)
    check(
        on_a_bucket(), rollout={"colocate": True, "server": {"rendezvous": "/tmp/r"}}, sync={"transport": {"folder": "/tmp/w"}}
    )
    check(on_a_volume(setup=["fetch /data/m"]), model={"path": "/data/m"})


@pytest.mark.parametrize(
    ("cluster", "keys", "said"),
    [
        (
            on_a_bucket(),
            APART,
            r"takes 3 machines with one folder of checkpoints, and skypilot\.workdir=/shared/me is on a bucket",
        ),
        (
            on_a_volume(),
            APART | {"sync": {"transport": {"folder": "/w"}}},
            r"sync\.transport\.folder=/w is not on a volume, and 3 machines share it",
        ),
        (
            on_a_bucket(),
            {"rollout": {"colocate": True, "server": {"rendezvous": "r"}}, "sync": {"transport": {"folder": "/tmp/w"}}},
            r"rollout\.server\.rendezvous=r is on a bucket, which has neither hard links nor",
        ),
        (on_a_volume(), {"output": "/shared/runs"}, r"output=/shared/runs: give a relative path; on the machines it is below"),
        (on_a_volume(), {"checkpoint": {"every": 0}}, r"checkpoint\.every=0: when machines are lost the run would start over"),
        (on_a_volume(), {"model": {"path": "/m"}}, r"model\.path=/m is not on the machines; put it below skypilot\.workdir"),
    ],
)
def test_what_the_machines_would_not_have_or_lose(cluster: Cluster, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(cluster, **keys)


def test_a_machine_that_would_be_left_out_of_a_managed_job_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"node_check\.spare_nodes is Slurm's; set it to 0: SkyPilot replaces machines"):
        check(replace(on_a_volume(), node_check=NodeCheckConfig(spare_nodes=1)))


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True)


def test_what_is_not_committed_would_not_travel(tmp_path: Path) -> None:
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "a")
    assert "HEAD of " in skypilot.check_code(tmp_path)[0] and "has no launch/bootstrap.py" in skypilot.check_code(tmp_path)[0]
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "bootstrap.py").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "b")
    (tmp_path / "notes.txt").write_text("stays where it is")
    assert skypilot.check_code(tmp_path) == []
    (tmp_path / "launch" / "new.py").write_text("")
    (tmp_path / "launch" / "bootstrap.py").write_text("changed")
    (said,) = skypilot.check_code(tmp_path)
    assert said.startswith("launch/bootstrap.py and 1 more would not be sent, since NeMo-Run sends the commit HEAD; commit")


def test_starts_are_counted_and_the_first_makes_the_run(tmp_path: Path) -> None:
    tree = {"name": "a", "output": str(tmp_path), "overwrite": True, "model": {"path": "m"}, "data": {"train": "t"}}
    config, run = tmp_path / "config.yaml", tmp_path / "a"
    config.write_text(json.dumps(tree))
    checkpoint = run / "checkpoints" / "step-00000005"
    checkpoint.mkdir(parents=True)
    assert bootstrap.count_start(str(config), "job_7-0") == 1
    assert not checkpoint.exists() and (run / "config.yaml").exists()  # as overwrite says
    checkpoint.mkdir(parents=True)
    assert bootstrap.count_start(str(config), "job_7-0") == 2 and checkpoint.exists()
    assert bootstrap.count_start(str(config), "job_8-0") == 1 and not checkpoint.exists()
