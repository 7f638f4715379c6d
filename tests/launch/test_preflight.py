"""The preflight of `python -m launch`: faults planted into a sound project are found before sbatch is called."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.__main__ import main
from launch.preflight.machines import host_path, written_bytes
from launch.profile import Cluster
from tepo_megatron.config.io import load_config, validate_as
from tepo_megatron.doctor.plan.command import KNOWN
from tests.launch.cases import PYTHON, ROOT

CONFIG: dict[str, Any] = {
    "name": "qwen",
    "model": {"path": "models/Qwen3-14B"},
    "data": {"train": "data/train.jsonl", "eval": "data/eval.jsonl", "prompt_key": "prompt"},
    "parallel": {"tp": 8, "sequence_parallel": True},
    "rollout": {"colocate": True, "function": "code/tools.py:sample", "server": {"tp": 8}},
    "reward": {"terms": [{"type": "math"}, {"type": "custom", "function": "code/tools.py:grade", "weight": 0.1}]},
    "evaluation": {"benchmarks": ["aime24", "math500"], "benchmark_folder": "data/benchmarks"},
    "checkpoint": {"every": 2},
}
PROFILE: dict[str, Any] = {
    "python": "python",
    "gpus_per_node": 8,
    "environment": {"HF_HUB_OFFLINE": "1"},
    "secrets": ["WANDB_API_KEY"],
    "container": {"image": "IMAGES/tepo.sqsh", "mounts": ["IMAGES:/images"]},
    "slurm": {"account": "lab", "partition": "batch", "time": "04:00:00", "warning_seconds": 900},
}
SBATCH = """#!/bin/bash
echo "$*" >> "{calls}"
echo 4711
"""


class Project:
    """A sound project, whose parts a test breaks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.words = folder / "work", monkeypatch, [""][:0]
        self.config, self.profile = json.loads(json.dumps(CONFIG)), json.loads(json.dumps(PROFILE))
        self.images, self.calls = folder / "images", folder / "calls"
        for path, text in {
            "models/Qwen3-14B/config.json": json.dumps(dict(KNOWN["Qwen3-14B"])),
            "models/Qwen3-14B/tokenizer.json": "{}",
            "models/Qwen3-14B/model.safetensors": "weights",
            "data/train.jsonl": '{"prompt": "1+1?", "answer": "2"}\n',
            "data/eval.jsonl": '{"prompt": "1+2?", "answer": "3"}\n',
            "data/benchmarks/aime24.jsonl": '{"problem": "1+3?", "answer": "4"}\n',
            "data/benchmarks/math500.jsonl": '{"problem": "1+4?", "answer": "5"}\n',
            "code/tools.py": "async def sample(sampler, prompt): ...\n\ndef grade(prompt, response, answer): return 1.0\n",
        }.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_text(text)
        self.images.mkdir()
        (self.images / "tepo.sqsh").write_text("an image")
        programs = folder / "bin"
        programs.mkdir()
        (programs / "sbatch").write_text(SBATCH.format(calls=self.calls))
        (programs / "sbatch").chmod(0o755)
        self.patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        self.patch.setenv("WANDB_API_KEY", "x")
        self.patch.chdir(self.folder)

    def write(self) -> list[str]:
        """Write config and profile; return the words of a submission."""
        text = yaml.safe_dump(self.profile).replace("IMAGES", str(self.images))
        (self.folder / "run.yaml").write_text(yaml.safe_dump(self.config))
        (self.folder / "mine.yaml").write_text(text)
        return ["run.yaml", "--executor", "slurm", "--cluster", "mine.yaml", *self.words]

    def remove(self, path: str) -> None:
        place = self.folder / path
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink()

    def text(self, path: str, text: str) -> None:
        """Write a file of the project."""
        (self.folder / path).write_text(text)


def put(tree: str, key: str, value: object) -> Callable[[Project], None]:
    """Return a change of a key in `config` or `profile`."""

    def change(project: Project) -> None:
        *parents, leaf = key.split(".")
        section = getattr(project, tree)
        for name in parents:
            section = section[name]
        section[leaf] = value

    return change


def index(project: Project) -> None:
    project.remove("models/Qwen3-14B/model.safetensors")
    weights = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    project.text("models/Qwen3-14B/model.safetensors.index.json", json.dumps(weights))
    project.text("models/Qwen3-14B/model-00001-of-00002.safetensors", "weights")


def full_disk(project: Project) -> None:
    usage = shutil.disk_usage("/")
    project.patch.setattr(shutil, "disk_usage", lambda _: type(usage)(10, 9, 1))


def no_sbatch(project: Project) -> None:
    project.patch.setenv("PATH", "/nowhere")


def sinfo(answer: str) -> Callable[[Project], None]:
    """Return a change after which `sinfo` prints this line about the partition."""

    def change(project: Project) -> None:
        program = project.folder.parent / "bin" / "sinfo"
        program.write_text(f"#!/bin/bash\n[ -z '{answer}' ] || echo '{answer}'\n")
        program.chmod(0o755)

    return change


def bare(project: Project) -> None:
    del project.profile["container"]
    project.profile["python"] = ".venv/bin/python"


def elsewhere(key: str, path: str) -> Callable[[Project], None]:
    """Return a change that moves something out of the working directory, to where the container sees nothing."""

    def change(project: Project) -> None:
        section, _, leaf = key.rpartition(".")
        source = project.config[section][leaf] if section else "runs"
        target = project.folder.parent / "outside" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if section:
            name = str(source).partition(":")[0]
            shutil.move(project.folder / name, target)
            put("config", key, f"{target}{str(source).removeprefix(name)}")(project)
        else:
            put("config", key, str(target))(project)

    return change


# name -> (what is broken, text with the key, text with the fix)
PLANTED: dict[str, tuple[Callable[[Project], None], str, str]] = {
    "no model": (lambda p: p.remove("models/Qwen3-14B"), "model.path=models/Qwen3-14B is", "fetch it (`hf download"),
    "model of the hub": (put("config", "model.path", "Qwen/Qwen3-14B"), "model.path=Qwen/Qwen3-14B is a name on", "`hf downl"),
    "no config.json": (lambda p: p.remove("models/Qwen3-14B/config.json"), "model.path=", "config.json is not in it; fetch it"),
    "no weights": (lambda p: p.remove("models/Qwen3-14B/model.safetensors"), "model.path=", "no *.safetensors are in it; f"),
    "half a model": (index, "model.path=", "model-00002-of-00002.safetensors and 0 more of 2 files are missing; fetch it"),
    "no tokenizer": (lambda p: p.remove("models/Qwen3-14B/tokenizer.json"), "model.path=", "no tokenizer is in it"),
    "no reference": (
        put("config", "objective", {"ref_kl": {"beta": 0.1, "path": "models/none"}}),
        "objective.ref_kl.path=models/none is no folder here",
        "fetch it",
    ),
    "no data": (put("config", "data.train", "data/none.jsonl"), "data.train=data/none.jsonl: there is no", "correct the path"),
    "no eval": (put("config", "data.eval", "data/none.jsonl"), "data.eval=data/none.jsonl: there is no", "correct the path"),
    "empty data": (lambda p: p.text("data/train.jsonl", ""), "data.train=", "is empty; give a file with one JSON object"),
    "no JSON": (lambda p: p.text("data/train.jsonl", "1+1?\n"), "data.train=", "no JSON object; give a file with one per line"),
    "other keys": (
        lambda p: p.text("data/train.jsonl", '{"question": "1"}'),
        "the first row has no 'prompt' (it has question)",
        "set data.prompt_key to its name",
    ),
    "data of the hub": (put("config", "data.train", "lab/maths"), "data.train=lab/maths is a data", "--repo-type dataset"),
    "no benchmarks": (lambda p: p.remove("data/benchmarks"), "evaluation.benchmark_folder=data/benchmarks is", "make it"),
    "a benchmark": (
        lambda p: p.remove("data/benchmarks/math500.jsonl"),
        "evaluation.benchmark_folder=data/benchmarks: math500 would be downloaded, and environment.HF_HUB_OFFLINE is set",
        "put each there as NAME.jsonl",
    ),
    "no folder of benchmarks": (
        put("config", "evaluation.benchmark_folder", None),
        "evaluation.benchmark_folder=null: aime24, math500 would be downloaded",
        "set evaluation.benchmarks to null",
    ),
    "no rollout function": (put("config", "rollout.function", "code/none.py:f"), "rollout.function=", "correct the path"),
    "no such rollout function": (put("config", "rollout.function", "code/tools.py:f"), "rollout.function=", "correct the name"),
    "no reward function": (
        lambda p: p.config["reward"]["terms"][1].update(function="code/tools.py:judge"),
        "reward.terms[1].function=code/tools.py:judge: code/tools.py defines no judge",
        "correct the name",
    ),
    "code that cannot be parsed": (lambda p: p.text("code/tools.py", "def f(:\n"), "cannot be parsed", "correct it"),
    "no image": (lambda p: (p.images / "tepo.sqsh").unlink(), "container.image=", "import it (`enroot import -o"),
    "an image without a path": (
        put("profile", "container.image", "images/tepo.sqsh"),
        "container.image=images/tepo.sqsh: Pyxis takes it for an image of a registry",
        "write /",
    ),
    "an image as Docker writes it": (
        put("profile", "container.image", "nvcr.io/nvidia/pytorch:26.01-py3"),
        "container.image=nvcr.io/nvidia/pytorch:26.01-py3",
        "write nvcr.io#nvidia/pytorch:26.01-py3",
    ),
    "no image's name": (put("profile", "container.image", "te po"), "container.image=te po is no image", "write [REGISTRY#]"),
    "no mounted folder": (
        put("profile", "container.mounts", ["/nowhere/at/all:/nowhere"]),
        "container.mounts: /nowhere/at/all does not exist here",
        "correct it, or move the mount to container.node_mounts",
    ),
    "unmounted model": (elsewhere("model.path", "m"), "model.path=", "to container.mounts"),
    "unmounted data": (elsewhere("data.train", "t.jsonl"), "data.train=", "to container.mounts"),
    "unmounted benchmarks": (
        elsewhere("evaluation.benchmark_folder", "b"),
        "evaluation.benchmark_folder=",
        "to container.mounts",
    ),
    "unmounted code": (elsewhere("rollout.function", "tools.py"), "rollout.function=", "to container.mounts"),
    "unmounted output": (elsewhere("output", "runs"), "output=", "to container.mounts"),
    "output on a read-only mount": (
        lambda p: (put("profile", "container.mounts", ["IMAGES:/images:ro"])(p), put("config", "output", "/images/runs")(p)),
        "output=/images/runs is on the read-only mount of /images",
        "remove :ro",
    ),
    "full disk": (full_disk, "output=runs: ", "lower checkpoint.keep_last"),
    "no interpreter": (bare, "python=.venv/bin/python is not a program here", "run `make`"),
    "no secret": (lambda p: p.patch.delenv("WANDB_API_KEY"), "secrets: WANDB_API_KEY is not set", "`export WANDB_API_KEY="),
    "too many ranks": (put("config", "parallel.dp", 2), "parallel has 16 ranks, on 2 machines", "--rollout.server.rendezvous"),
    "ranks that fill no machine": (put("config", "parallel.tp", 12), "parallel has 12 ranks", "make it a multiple of 8"),
    "machines without GPUs": (put("profile", "gpus_per_node", 0), "platform=cuda, and the cluster's", "set gpus_per_node"),
    "shared machines without GRES": (
        lambda p: (p.profile.update(gpus_per_node=None, ranks_per_node=8), p.profile["slurm"].update(exclusive=False)),
        "slurm.exclusive=false and gpus_per_node=0",
        "set slurm.exclusive to true",
    ),
    "no checkpoints": (put("config", "checkpoint.every", 0), "checkpoint.every=0", "set it to a number of steps"),
    "a warning too short": (
        put("profile", "slurm.warning_seconds", 60),
        "slurm.warning_seconds=60: before its time limit the job waits 30 s until the running step is saved",
        "raise it to",
    ),
    "too large for the GPUs": (
        put("config", "training", {"max_tokens_per_microbatch": 999_999}),
        "parallel, rollout: tepo plan for H100: does not fit",
        "lower training.max_tokens_per_microbatch",
    ),
    "unknown GPU": (put("profile", "gpu", "H10"), "gpu=H10: not in the table", "use one of H100"),
    "unknown key of the profile": (put("profile", "gpu_per_node", 8), "gpu_per_node: unknown", "did you mean gpus_per_node?"),
    "unknown key of a section": (put("profile", "slurm.partitoin", "a"), "slurm.partitoin: unknown", "you mean partition?"),
    "wrong value in the profile": (put("profile", "slurm.time", "4h"), "slurm: time='4h' is not", "YAML needs the quotes"),
    "no profile": (lambda p: p.words.extend(["--cluster", "none.yaml"]), "none.yaml: cannot read", "give the path"),
    "an example's value": (put("profile", "slurm.account", "my-account"), "slurm.account=my-account is the value", "change it"),
    "unknown key of the config": (put("config", "optimiser", {}), "optimiser: unknown key", "did you mean optimizer?"),
    "no such partition": (sinfo(""), "slurm.partition=batch is none of this cluster's", "choose one that `sinfo"),
    "no GRES": (sinfo("9|infinite|(null)"), "gpus_per_node=8: the machines of the", "set gpus_per_node to null and ranks_per"),
    "fewer GPUs": (sinfo("9|1-00:00:00|gpu:a100:4(S:0-1)"), "gpus_per_node=8: ", "have 4 GPUs at most; lower it"),
    "a shorter limit": (sinfo("9|1:00:00|gpu:8"), "slurm.time=04:00:00 exceeds the limit 1:00:00", "lower it"),
    "too few machines": (
        lambda p: (sinfo("1|infinite|gpu:h100:8,shard:9")(p), p.profile.update(node_check={"spare_nodes": 1})),
        "slurm.partition=batch has 1 machines with 8 GPUs, and the run takes 2",
        "lower parallel.*",
    ),
    "no sbatch": (no_sbatch, "sbatch is not on PATH", "call launch on a login node"),
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    return Project(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_before_sbatch_is_called(
    project: Project, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, key, fix = PLANTED[name]
    plant(project)
    assert main(project.write()) == 1
    error = capsys.readouterr().err
    assert "nothing was submitted" in error
    lines = [line for line in error.splitlines() if key in line and fix in line]
    assert lines, error
    assert not project.calls.exists()
    assert not (project.folder / "runs").exists()


@pytest.mark.e2e
def test_a_sound_project_is_submitted_within_ten_seconds(project: Project) -> None:
    """The bound is on processor time, which other work on the machine does not change; the wall time is printed."""
    words = project.write()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    started, before = time.monotonic(), os.times()
    call = [PYTHON, "-m", "launch", *words, "--allow-dirty"]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=120, check=False)
    seconds, after = time.monotonic() - started, os.times()
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    assert done.returncode == 0, done.stdout + done.stderr
    assert "job 4711" in done.stdout and "skipped" not in done.stdout
    assert project.calls.read_text().count("\n") == 1
    assert {"node_check.py", "node_facts.py"} <= {path.name for path in (project.folder / "runs/qwen/launch/jobs/1").iterdir()}
    print(f"from the call to the queued job: {seconds:.1f} s, of which {busy:.1f} s of processor time")
    assert busy <= 10


def test_paths_of_the_container_are_looked_up_on_the_hosts_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mounts = ["/lab:/data", "/lab/big:/data/models:ro"]
    cluster = validate_as(Cluster, {"container": {"image": "i", "mounts": mounts, "node_mounts": ["/raid:/raid"]}}, "c")
    assert host_path("/data/models/a", cluster) == Path("/lab/big/a")
    assert host_path("/data/t.jsonl", cluster) == Path("/lab/t.jsonl")
    assert host_path("/raid/x", cluster) == Path("/raid/x")
    assert host_path("data/models", cluster) == tmp_path / "data/models"


def test_the_space_of_a_run_is_that_of_its_checkpoints(project: Project) -> None:
    project.write()
    (project.folder / "models/Qwen3-14B/model.safetensors").write_bytes(bytes(2000))
    cfg = load_config("run.yaml", ["--checkpoint.keep_last", "2"])
    assert written_bytes(cfg, Path("models/Qwen3-14B")) == 1000 * (3 * 14 + 2)
    assert (
        written_bytes(load_config("run.yaml", ["--export_hf", "false", "--checkpoint.every", "0"]), Path("models/Qwen3-14B"))
        == 0
    )
