"""Go on from a checkpoint: the first start of a resumed run, or ranks that were restarted next to a living rollout service."""

from typing import NamedTuple

from tepo_megatron.actor.actor import Actor
from tepo_megatron.checkpoint.checkpoints import Checkpoints
from tepo_megatron.controller.driver import Driver
from tepo_megatron.controller.messages import KeptRollouts
from tepo_megatron.distributed.objects import broadcast_object, broadcast_result
from tepo_megatron.distributed.parallel import ParallelDims


class StartingPoint(NamedTuple):
    """Where this start of the ranks begins. `lacks_evaluation`: whether these weights have to be evaluated first."""

    step: int
    lacks_evaluation: bool
    kept: KeptRollouts | None


def starting_point(
    resumes: bool, checkpoints: Checkpoints, actor: Actor, driver: Driver, groups: ParallelDims
) -> StartingPoint:
    """Restore the newest checkpoint, if there is one and the run is resumed. All ranks call it.

    Collectives: one broadcast over the host group, and if the run is resumed, another one and those of the checkpoint.
    """
    if not broadcast_object(resumes, groups.host):
        return StartingPoint(0, lacks_evaluation=True, kept=None)
    found = checkpoints.newest()
    state = None if found is None else checkpoints.load(found, actor)
    if state is not None:
        actor.noise_floor = state["noise_floor"]
    passed_over = [] if found is None else found.passed_over
    kept = broadcast_result(lambda: driver.resume(state, passed_over), groups.host)
    if state is None:
        return StartingPoint(0, lacks_evaluation=True, kept=kept)
    return StartingPoint(int(state["step"]), state.get("lacks_evaluation", False), kept)
