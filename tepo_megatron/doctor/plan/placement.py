"""Determine the GPUs of trainer and engine from the config (`docs/launch.md`, "Where ranks and servers are")."""

from dataclasses import dataclass
from typing import Literal

from tepo_megatron.config import RolloutConfig
from tepo_megatron.doctor.plan.gpus import GPUS_PER_NODE

Kind = Literal["colocated", "disaggregated"]


@dataclass(frozen=True)
class Placement:
    """The GPUs of trainer and engine."""

    kind: Kind  # "colocated" (rollout.colocate), or "disaggregated": the engine has GPUs of its own.
    trainer: int
    engine: int
    here: bool  # true if the run's first rank starts the servers

    @property
    def gpus(self) -> int:
        """Return the GPUs of both together."""
        return self.trainer + self.engine if self.kind == "disaggregated" else max(self.trainer, self.engine)

    @property
    def machines(self) -> int:
        """Return the number of machines, with eight GPUs each."""
        return -(-self.gpus // GPUS_PER_NODE)

    @property
    def fault(self) -> str:
        """Return why the servers cannot be placed as configured; empty if they can."""
        if self.here and self.trainer > GPUS_PER_NODE:
            return (
                f"the run starts its servers on the first of {-(-self.trainer // GPUS_PER_NODE)} machines of ranks; set "
                "rollout.server.rendezvous, with which they are on each of them (rollout.colocate=true), or with "
                "sync.transport.folder on machines of their own (false)"
            )
        if self.here and self.gpus > GPUS_PER_NODE:
            return (
                f"{self.gpus} GPUs of ranks and servers do not fit one machine; lower rollout.servers or rollout.server.tp, or "
                "set rollout.server.rendezvous, which gives servers machines of their own"
            )
        return ""


def placement_of(ranks: int, rollout: RolloutConfig) -> Placement:
    """Return the placement of a run."""
    server = rollout.server
    engine = 0 if rollout.replay is not None else rollout.servers * server.tp
    kind: Kind = "colocated" if rollout.colocate else "disaggregated"
    return Placement(kind, ranks, engine, here=engine > 0 and not server.others)
