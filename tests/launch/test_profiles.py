"""Profiles of clusters: their keys, their refusals, and the machines on which a run goes."""

from pathlib import Path
from typing import Any

import pytest

from launch.checks import check_paths, check_run
from launch.layout import Layout, lay_out
from launch.profile import Cluster, load_cluster
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config
from tepo_megatron.config.io import validate, validate_as

ROOT = Path(__file__).parents[2]
SLURM = {"account": "lab"}


def cluster(**keys: Any) -> Cluster:
    return validate_as(Cluster, keys, "cluster.yaml")


def run(**keys: Any) -> Config:
    tree = {"name": "a", "model": {"path": "/m/a"}, "data": {"train": "/d/t.jsonl"}, "checkpoint": {"every": 5}}
    return validate({**tree, **keys})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"kuberay": {}}, r"cluster\.yaml: kuberay was removed: under another scheduler than Slurm .*; see CHANGELOG\.md$"),
        ({"gpu_per_node": 8}, r"cluster\.yaml: gpu_per_node: unknown key; did you mean gpus_per_node\?"),
        ({"slurm": {"partition": "a"}}, r"cluster\.yaml: slurm\.account: this key is required"),
        ({"slurm": {**SLURM, "time": 43200}}, r'slurm: time=\'43200\' is not "HH:MM:SS".*YAML needs the quotes'),
        ({"slurm": {**SLURM, "time": "00:10:00"}}, r"warning_seconds=900 is not below time=00:10:00 \(600 s\); lower it"),
        ({"slurm": {**SLURM, "options": {"signal": "KILL@1"}}}, r"options: signal has a key of its own"),
        ({"slurm": {**SLURM, "options": {"ntasks-per-node": "8"}}}, r"options: ntasks_per_node has a key of its own"),
        ({"environment": {"HF_TOKEN": "abc"}}, r"environment\.HF_TOKEN looks like a secret.*put its name under secrets"),
        ({"environment": {"lower": "1"}}, r"'lower' is no name of an environment variable in capitals"),
        ({"secrets": ["A_KEY=1"]}, r"'A_KEY=1' is no name"),
        ({"environment": {"NCCL_IB_HCA": "a"}, "network": {"infiniband": "b"}}, r"environment\.NCCL_IB_HCA is given twice"),
        ({"network": {"interface": "^docker"}}, r"network: interface: '\^docker' is no whole name of an interface; give names"),
        (
            {"network": {"interface": "eth0,lo"}},
            r"network: interface: lo reaches no other machine; name another one, or set null",
        ),
        ({"cache": "~/cache"}, r"cache='~/cache' is no absolute path"),
        ({"cache": "/raid", "environment": {"TRITON_HOME": "/tmp"}}, r"environment\.TRITON_HOME is given twice, by cache too"),
        ({"slurm": {**SLURM, "options": {"constraint": "a"}}}, r"options: constraint has a key of its own"),
        ({"slurm": {**SLURM, "srun_args": ["--nodelist=n1"]}}, r"srun_args: nodelist is set by launch; remove it there"),
        ({"slurm": {**SLURM, "srun_args": ["--mpi none"]}}, r"srun_args: '--mpi none' is not one option; write .*--name=value"),
        ({"slurm": {**SLURM, "srun_args": ["--comment=$(id)"]}}, r"srun_args: .* is not one option"),
        ({"slurm": {**SLURM, "setup": ["a\nb"]}}, r"setup: 'a\\nb' is not one line of bash; give a list of lines"),
        (
            {"node_check": {"skip": ["all_reduce"], "min_gb_per_second": 9}},
            r"node_check: min_gb_per_second=9\.0 and skip: all_reduce contradict each other; remove one of them",
        ),
        ({"container": {"image": "i", "node_mounts": ["/raid"]}}, r"container: mounts: '/raid' is not /HOST/PATH:/CONTAINER"),
        ({"slurm": {**SLURM, "convert": {"nodes": "2"}}}, r"slurm: convert: nodes is set by launch; remove it there"),
        ({"slurm": {**SLURM, "evaluate": {"gpus-per-node": "h100:2"}}}, r"evaluate: gpus_per_node='h100:2' is not a number"),
        ({"slurm": {**SLURM, "convert": {"time": "30"}}}, r'slurm: convert: time=\'30\' is not "HH:MM:SS"'),
        ({"slurm": {**SLURM, "partitoin": "a"}}, r"slurm\.partitoin: unknown key; did you mean partition\?"),
        ({"container": {"image": "i", "mounts": ["data"]}}, r"container: mounts: 'data' is not /HOST/PATH:/CONTAINER/PATH"),
    ],
)
def test_a_mistake_is_reported_with_its_key_and_the_fix(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster(**keys)


@pytest.mark.parametrize("path", sorted((ROOT / "launch" / "profiles").glob("*.yaml")), ids=lambda path: path.name)
def test_the_profiles_of_the_repository_are_valid(path: Path) -> None:
    assert isinstance(load_cluster(path), Cluster)


APART = {"server": {"rendezvous": "r"}}


@pytest.mark.parametrize(
    ("parallel", "rollout", "expected"),
    [
        ({"tp": 8}, {"colocate": True}, Layout(1, 8)),
        ({"tp": 4}, {"server": {"tp": 4}}, Layout(1, 4)),
        ({"tp": 2}, {"colocate": True}, Layout(1, 2)),
        ({"tp": 8, "dp": 4}, {"servers": 4, "server": {"rendezvous": "r", "tp": 4}}, Layout(4, 8, 2, 2)),
        ({"tp": 2}, {"servers": 3, **APART}, Layout(1, 2, 1, 3)),
        (
            {"tp": 8, "dp": 4},
            {"colocate": True, "servers": 8, "server": {"rendezvous": "r", "tp": 4}},
            Layout(4, 8, 4, 2, True),
        ),
        ({"tp": 4}, {"colocate": True, "servers": 2, **APART}, Layout(1, 4, 1, 2, True)),
        ({"tp": 8, "pp": 2}, {"server": {"urls": ["http://a:1"]}}, Layout(2, 8)),
        ({"tp": 8, "pp": 2}, {"replay": "rollouts"}, Layout(2, 8)),
    ],
)
def test_machines_of_eight(parallel: dict[str, int], rollout: dict[str, Any], expected: Layout) -> None:
    cfg = run(parallel=parallel, rollout=rollout, sync={"transport": {"folder": "w"}})
    assert lay_out(cfg, cluster(gpus_per_node=8)) == expected
    assert expected.nodes == expected.train_nodes + expected.serve_nodes * (not expected.shared)


@pytest.mark.parametrize(
    ("parallel", "rollout", "said"),
    [
        ({"tp": 8, "dp": 2}, {"colocate": True}, r"parallel has 16 ranks, on 2 machines of 8.*--rollout\.server\.rendezvous"),
        ({"tp": 8}, {}, r"8 ranks and rollout\.servers=1 of rollout\.server\.tp=1 take 9 GPUs, and a machine has 8; let them"),
        ({"dp": 12}, {}, r"parallel has 12 ranks: on machines of 8 some would stay empty"),
        ({"tp": 8}, {"servers": 3, "server": {"rendezvous": "r", "tp": 4}}, r"rollout\.servers=3 of 4 GPUs: .* of 2 some"),
        (
            {"tp": 8, "dp": 4},
            {"colocate": True, "servers": 6, **APART},
            r"rollout\.servers=6 of 1 GPUs cannot be spread evenly over the 4 machines of the ranks",
        ),
        (
            {"tp": 8, "dp": 2},
            {"colocate": True, "servers": 4, "server": {"rendezvous": "r", "tp": 8}},
            r"servers=4 of 8 GPUs cannot be spread evenly over the 2 machines of the ranks, at most 1 on each",
        ),
        ({"tp": 8}, {"server": {"rendezvous": "r", "tp": 16}}, r"rollout\.server\.tp=16 exceeds the 8 GPUs of a machine"),
    ],
)
def test_what_fits_no_machines_is_refused(parallel: dict[str, int], rollout: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        lay_out(run(parallel=parallel, rollout=rollout, sync={"transport": {"folder": "w"}}), cluster(gpus_per_node=8))


def test_machines_whose_scheduler_knows_no_gpus() -> None:
    """Before, gpus_per_node: 0 was refused for a run on GPUs, and any other number wrote --gpus-per-node."""
    for gpus in (None, 0):
        without = cluster(gpus_per_node=gpus, ranks_per_node=8, slurm=SLURM)
        assert lay_out(run(parallel={"tp": 8, "dp": 2}, rollout={"replay": "r"}), without) == Layout(2, 8)
        assert without.gpus == 8
        check_run(run(), without)
        shared = cluster(gpus_per_node=gpus, ranks_per_node=8, slurm={**SLURM, "exclusive": False})
        with pytest.raises(ConfigError, match=r"slurm\.exclusive=false and gpus_per_node=0: .*set slurm\.exclusive to true"):
            check_run(run(), shared)


def test_faults_of_the_job_are_found_before_it_is_submitted() -> None:
    slurm = cluster(gpus_per_node=8, slurm=SLURM)
    with pytest.raises(ConfigError, match=r"checkpoint\.every=0: after a failure the run would start over"):
        check_run(run(checkpoint={"every": 0}), slurm)
    check_run(run(checkpoint={"every": 0}), cluster(gpus_per_node=8, slurm={**SLURM, "restarts": 0}))
    image = {"image": "i", "mounts": ["/m:/m", "/elsewhere:/d:ro"]}
    check_run(run(), cluster(container=image))
    with pytest.raises(ConfigError, match=r"data\.train=/d/t\.jsonl is not in the container; add /d:/d to container\.mounts"):
        check_run(run(), cluster(container={"image": "i", "mounts": ["/m:/m"]}))
    with pytest.raises(ConfigError, match="NeMo-Run replaces /nemo_run in its scripts"):
        check_paths([Path("/home/me/nemo_runs/a")])
