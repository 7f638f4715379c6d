"""The dry runs for KubeRay that are in golden/. `python -m tests.launch.kuberay_cases` in .venv writes them again."""

from __future__ import annotations

import tempfile
from dataclasses import fields
from pathlib import Path

import yaml

from launch.profile import Cluster
from launch.ray_plan import RayJob
from launch.sections import KubeRayConfig
from tests.launch import cases

CONTAINER = {"image": "registry.example.com/tepo:vllm"}
SECTION = {
    "namespace": "lab", "claims": {"shared": "/shared"}, "cpu": "96", "memory": "1000Gi", "secret": "keys", "user": 1000,
    "group": 100, "node_selector": {"pool": "h100"}, "tolerations": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
    "devices": {"rdma/hca": 1},
}  # fmt: skip
# every key of the section that may be set, and has no value in SECTION
MORE = {
    "head_node_selector": {"pool": "cpu"}, "head_tolerations": [{"key": "a", "operator": "Equal", "value": "b"}],
    "labels": {"kueue.x-k8s.io/queue-name": "lab"}, "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
    "scheduler": "kai-scheduler", "priority_class": "high", "host_network": True, "capabilities": ["IPC_LOCK"],
}  # fmt: skip
CASES = {
    "kuberay_colocated": ["run.yaml", "--cluster", "k8s.yaml"],
    "kuberay_apart": ["run.yaml", "--cluster", "k8s.yaml", *cases.APART, "--sync.transport.folder", "weights"],
    "kuberay_convert": ["convert", "out", "--cluster", "k8s.yaml", "--", "inspect", "a model"],
}


def prepare(folder: Path) -> dict[str, object]:
    """Write the files that the cases name, with a claim that holds the folder; return the tree of the profile."""
    cases.prepare(folder)
    section = SECTION | {"claims": {"shared": "/shared", "home.of.all": str(folder)}}
    shared = {key: value for key, value in cases.CLUSTER.items() if key != "slurm"}
    tree: dict[str, object] = {**shared, "container": CONTAINER, "kuberay": section}
    (folder / "k8s.yaml").write_text(yaml.safe_dump(tree))
    return tree


def dry_runs(folder: Path) -> dict[str, tuple[int, str, str]]:
    """Return the output of all cases for a project in /project, whose checksum is replaced by c0ffee."""
    prepare(folder)
    calls = {name: cases.before_dashes(words, "--executor", "kuberay", "--dry-run") for name, words in CASES.items()}
    found = {}
    for name, (status, out, said) in cases.call(folder, calls).items():
        home = folder / ("out" if name == "kuberay_convert" else "runs/qwen") / "launch"
        checksum = RayJob("a", home, 1, [], Cluster()).id.split("-")[-2]
        found[name] = status, cases.normal(out, folder).replace(checksum, "c0ffee"), said
    return found


def with_every_key(folder: Path) -> tuple[int, str, str]:
    """Return status, output and messages of a dry run with a profile that has every key of the section."""
    tree = prepare(folder)
    assert isinstance(tree["kuberay"], dict)
    section = tree["kuberay"] | MORE
    unset = {field.name for field in fields(KubeRayConfig)} - section.keys()
    assert all(getattr(KubeRayConfig(**SECTION), name) for name in unset), f"MORE lacks {unset}"
    (folder / "k8s.yaml").write_text(yaml.safe_dump({**tree, "kuberay": section}))
    words = cases.before_dashes(CASES["kuberay_apart"], "--executor", "kuberay", "--dry-run")
    return cases.call(folder, {"every": words})["every"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for case, (status, text, said) in dry_runs(Path(scratch)).items():
            assert status == 0, said
            (cases.GOLDEN / f"{case}.txt").write_text(text)
