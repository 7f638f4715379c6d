"""Compare a job with its Slurm partition, as `sinfo` describes it: machines, GPUs, time limit."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from launch.layout import Layout
from launch.profile import Cluster

_ANSWER_SECONDS = 5
_GPUS = re.compile(r"\bgpu(?::[A-Za-z][\w.-]*)?:(\d+)")


def faults(cluster: Cluster, layout: Layout) -> Iterator[str]:
    """Yield what the partition of a job does not have. Without a partition, `sinfo` or its answer nothing is checked."""
    slurm = cluster.slurm
    if slurm is None or slurm.partition is None:
        return
    words = ["sinfo", "--noheader", "--partition", slurm.partition, "--format", "%D|%l|%G"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode:
        return
    groups = [line.split("|", 2) for line in done.stdout.splitlines() if line.count("|") >= 2]
    if not groups:
        yield f"slurm.partition={slurm.partition} is none of this cluster's; choose one that `sinfo --summarize` lists"
        return
    seconds = [limit for _, text, _ in groups if (limit := _seconds(text)) is not None]
    if seconds and slurm.seconds > max(seconds):
        yield f"slurm.time={slurm.time} exceeds the limit {groups[0][1]} of the partition {slurm.partition}; lower it"
    wanted, asked = layout.nodes + cluster.node_check.spare_nodes, cluster.gpus_per_node or 0
    gpus = [sum(map(int, _GPUS.findall(gres))) for *_, gres in groups]
    if asked and not any(gpus):
        yield (
            f"gpus_per_node={asked}: the machines of the partition {slurm.partition} have no GRES of GPUs; set gpus_per_node "
            f"to null and ranks_per_node to {asked}, or choose another partition"
        )
    elif asked > max(gpus):
        yield (
            f"gpus_per_node={asked}: the machines of the partition {slurm.partition} have {max(gpus)} GPUs at most; lower it, "
            "or choose another partition"
        )
    elif (there := sum(int(nodes) for (nodes, *_), n in zip(groups, gpus, strict=True) if n >= asked)) < wanted:
        yield (
            f"slurm.partition={slurm.partition} has {there} machines with {asked} GPUs, and the run takes {wanted}; lower "
            "parallel.* or rollout.servers, or choose another partition"
        )


def _seconds(text: str) -> int | None:
    """Return the seconds of a time limit as Slurm prints it; None for no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + seconds
