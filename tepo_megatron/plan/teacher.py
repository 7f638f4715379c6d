"""Predict what the exact KL to a teacher takes (`objective.ref_kl.estimator: full`)."""

from collections.abc import Mapping

from tepo_megatron.config import ObjectiveConfig, ParallelConfig
from tepo_megatron.weights.ops import Architecture

ON_HOST = "teacher's hidden states of an update"


def has_teacher(objective: ObjectiveConfig) -> bool:
    """Return whether an objective takes the KL over the whole vocabulary."""
    return (objective.ref_kl or {}).get("estimator") == "full"


def device_bytes(arch: Architecture, parallel: ParallelConfig, rows: int, element: int) -> Mapping[str, float]:
    """Return the memory of a rank of the last stage during an update: its output layer, and a microbatch's hidden states."""
    vocabulary = -(-arch.vocab_size // parallel.tp)
    return {"teacher": (vocabulary + rows) * arch.hidden_size * element}


def hidden_bytes(arch: Architecture, parallel: ParallelConfig, rows: int, element: int) -> float:
    """Return the host memory of a rank's hidden states of one update."""
    return rows / parallel.dp / parallel.cp * arch.hidden_size * element
