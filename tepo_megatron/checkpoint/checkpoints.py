"""Save and load the checkpoints of a run: the interface of the training loop."""

import contextlib
import copy
import datetime
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from tepo_megatron.actor.actor import Actor
from tepo_megatron.base.errors import CheckpointError
from tepo_megatron.checkpoint import folder as folders
from tepo_megatron.checkpoint import optimizer, restoring, rng_state, saving
from tepo_megatron.checkpoint.restoring import FoundCheckpoint
from tepo_megatron.checkpoint.state import CONTENT, ShardCache
from tepo_megatron.checkpoint.tensors import HostCopy, SavePlanner, create_folder
from tepo_megatron.config import CheckpointConfig
from tepo_megatron.dist.objects import all_gather_object, all_true
from tepo_megatron.dist.own_peers import own_peers_only
from tepo_megatron.dist.parallel import ParallelDims

# Limit since a save began: 14B with Adam are 200 GB, at 60 MB/s over all ranks; then CheckpointError `still writing after`
TIMEOUT_SECONDS = 3600.0
# Limit since an error that ends the run: the save in flight, of some minutes, is to become complete; then it is lost
_ERROR_WAIT_SECONDS = 600.0


class Checkpoints:
    """The checkpoints of a run, in a folder that all ranks share.

    Every method is collective: all ranks call it, in the same order. `open` makes one.

    In addition to the actor's host memory, each rank keeps memory for a host copy of what it writes (weights, fp32 masters and
    Adam's moments, each element on one rank). The memory is kept from one save to the next, and is page-locked if the actor is
    on a GPU.
    """

    def __init__(
        self,
        folder: Path,
        cfg: CheckpointConfig,
        groups: ParallelDims,
        plans: SavePlanner,
        callers: dist.ProcessGroup,
        thread: saving.SavingThread,
        timeout_seconds: float,
    ) -> None:
        self._folder, self._cfg, self._groups, self._timeout_seconds = folder, cfg, groups, timeout_seconds
        self._plans, self._callers, self._thread = plans, callers, thread
        self._shard_cache, self._memory = ShardCache(), HostCopy()
        self._save: saving.PendingSave | None = None
        self._blocked = 0.0
        self._complete: deque[saving.SavedCheckpoint] = deque()
        self._broken: str | None = None
        self._held = contextlib.ExitStack()

    @classmethod
    def open(
        cls, folder: Path, cfg: CheckpointConfig, groups: ParallelDims, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> "Checkpoints":
        """Create two process groups and start the saving thread."""
        backend, limit = dist.get_backend(groups.host), datetime.timedelta(seconds=timeout_seconds)
        with own_peers_only():
            plans = SavePlanner(dist.new_group(backend=backend, timeout=limit))
            callers = dist.new_group(backend=backend, timeout=2 * limit)  # one rank may still wait for its saving thread
        if groups.is_main:
            folders.finish_deletions(folder)
        thread = saving.SavingThread()
        thread.start()
        return cls(folder, cfg, groups, plans, callers, thread, timeout_seconds)

    def save(self, step: int, actor: Actor, run_state: Mapping[str, Any], best: int | None = None) -> None:
        """Start saving the current state. Return once it is copied to host memory; training may then go on.

        A save in flight is waited for first. With `checkpoint.asynchronous` false the checkpoint is complete when this returns.
        With `checkpoint.hf` the Hugging Face export is written before this returns. Raises CheckpointError on every rank
        when an earlier save failed or the Hugging Face export cannot be written. Any other error of this save is raised by what
        waits for it: `poll`, `wait`, `close` or the next `save`.
        """
        start = time.perf_counter()
        self._settle()
        if self._broken is not None:
            raise CheckpointError(f"no more checkpoints can be written in this run: {self._broken}")
        # While this thread copies, without the interpreter lock, the saving thread finds out everything else. That includes
        # whether the shard slices known from the last save are still the state; if not, the new shard slices are copied below.
        before = self._shard_cache.shard_slices
        asked = self._thread.submit(
            lambda: (self._shard_cache.of(actor), rng_state.capture(), self._commit(step, actor, run_state, best))
        )
        copies = self._memory.take(before)
        try:
            (shard_slices, objects), states, commit = asked.result(self._timeout_seconds)
        except TimeoutError:
            limit = f"within {self._timeout_seconds:g} s"
            raise CheckpointError(f"rank {self._groups.rank}: the saving thread did not describe step {step} {limit}") from None
        if shard_slices is not before:
            copies = self._memory.take(shard_slices)
        if self._cfg.hf:
            create_folder(self._folder, step, commit.refused if commit else None, self._callers)
            actor.export_hf(folders.partial(self._folder, step) / "hf")
        rng = restoring.rng_name(self._groups.rank, self._groups.world_size)
        content = saving.CheckpointContent(copies, objects, rng, states)
        self._save = saving.PendingSave(self._folder, step, content, commit, self._plans, self._cfg.hf, start)
        self._thread.begin(self._save)
        self._blocked = time.perf_counter() - start
        if not self._cfg.asynchronous:
            self._settle()

    def poll(self) -> saving.SavedCheckpoint | None:
        """Return a checkpoint that has become complete and was not returned yet, or None. Do not wait.

        Collectives while a save is in flight: one all-reduce of a number, and an all-gather of small objects when the save has
        ended on every rank. Raises CheckpointError, on every rank, when the save failed.
        """
        if self._save is not None and all_true(self._save.is_over(), self._callers):
            self._finish(self._save)
        return self._complete.popleft() if self._complete else None

    def wait(self) -> saving.SavedCheckpoint | None:
        """Wait for the save in flight, then return like `poll`.

        Raises CheckpointError, on every rank, when the save failed or takes longer than `timeout_seconds`.
        """
        self._settle()
        return self._complete.popleft() if self._complete else None

    def newest(self) -> FoundCheckpoint | None:
        """Return the newest checkpoint whose files are all intact, or None if the folder holds no checkpoint.

        The checkpoint is protected from deletion until `load` or `close`. Raises CheckpointError when there are checkpoints but
        none is valid; the message names each and its defect.
        """
        return restoring.newest(self._folder, self._callers, self._held)

    def load(self, checkpoint: FoundCheckpoint, actor: Actor) -> dict[str, Any]:
        """Restore the saved state of the actor, on any parallel layout, and return the saved run state.

        On the layout that saved it, the run continues bit for bit. On another layout the random generators are not restored,
        and a warning says so. The learning rate schedule continues at its step, with the rates of the current config. Raises
        CheckpointError on every rank when the checkpoint belongs to another model or precision, or cannot be read.
        """
        try:
            restoring.restore(checkpoint, actor, self._groups, self._callers)
        finally:
            self._held.close()
        return checkpoint.run_state

    def close(self) -> None:
        """Wait for the save in flight; no other save can follow. Raises CheckpointError, on every rank, when it failed."""
        self._held.close()
        self._thread.end()
        self._settle()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        """Close. After an error, wait at most ten minutes for the save in flight, so that the error costs no checkpoint."""
        if kind is None:
            self.close()
            return
        self._held.close()
        self._thread.end()
        if self._save is not None:
            self._save.wait(min(_ERROR_WAIT_SECONDS, self._timeout_seconds))

    def _commit(self, step: int, actor: Actor, run_state: Mapping[str, Any], best: int | None) -> saving.CommitPlan | None:
        if not self._groups.is_main:
            return None
        common = {
            "iteration": step,
            "checkpoint_version": 3.0,  # Megatron's version number of the key names
            "optimizer": optimizer.common_state(actor.optimizer),
            "opt_param_scheduler": actor.scheduler.state_dict(),
            "content_metadata": CONTENT,
        }
        run, refused = b"", None
        try:
            run = restoring.describe_run(step, actor, run_state)
        except (TypeError, ValueError) as e:
            refused = str(e)
        return saving.CommitPlan(copy.deepcopy(common), run, refused, self._cfg.keep_last, self._cfg.keep_every, best)

    def _settle(self) -> None:
        if self._save is not None:
            self._save.wait(max(0.0, self._save.begun + self._timeout_seconds - time.perf_counter()))
            self._finish(self._save)

    def _finish(self, save: saving.PendingSave) -> None:
        """Exchange the outcomes of a save between ranks. Record the checkpoint, or raise CheckpointError on every rank."""
        self._save = None
        limit = self._timeout_seconds
        late = saving.SaveOutcome(error=f"rank {self._groups.rank}: still writing after {limit:g} s", broken=True)
        outcomes = all_gather_object(save.outcome or late, self._callers)
        errors = [o.error for o in outcomes if o.error is not None]
        path = folders.complete(self._folder, save.step)
        if any(o.broken for o in outcomes):
            self._broken = errors[0]
        if errors:
            raise CheckpointError(f"{path} was not written: {errors[0]}")
        seconds = save.ended - save.started
        blocked = self._blocked if self._cfg.asynchronous else seconds
        self._complete.append(saving.SavedCheckpoint(save.step, path, outcomes[0].size, blocked, seconds))
