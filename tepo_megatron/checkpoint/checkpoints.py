"""What the training loop calls."""

from __future__ import annotations

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
from tepo_megatron.checkpoint import folder as folders
from tepo_megatron.checkpoint import generators, optimizer, restoring
from tepo_megatron.checkpoint.agreement import all_true, from_all
from tepo_megatron.checkpoint.planning import Plans, make_room
from tepo_megatron.checkpoint.restoring import Found
from tepo_megatron.checkpoint.saving import Commit, Content, Outcome, Save, Saved, SavingThread
from tepo_megatron.checkpoint.state import CONTENT
from tepo_megatron.checkpoint.tensors import HostCopy
from tepo_megatron.checkpoint.views import Views
from tepo_megatron.config import CheckpointConfig
from tepo_megatron.errors import CheckpointError
from tepo_megatron.own_peers import own_peers_only
from tepo_megatron.parallel import Groups

_FAREWELL_SECONDS = 60.0  # for a save under way when an error ends the run


class Checkpoints:
    """The checkpoints of a run, in a folder that all ranks share. Every method is called by all ranks alike.

    Host memory beyond the actor's: what one rank writes (weights, masters and moments, over all ranks each once), kept from one
    save to the next, page-locked where the actor is on a GPU.
    """

    def __init__(self, folder: Path, cfg: CheckpointConfig, groups: Groups) -> None:
        self._folder, self._cfg, self._groups = folder, cfg, groups
        backend, limit = dist.get_backend(groups.host), datetime.timedelta(seconds=cfg.timeout_seconds)
        with own_peers_only():
            self._plans = Plans(dist.new_group(backend=backend, timeout=limit))  # used by the saving threads alone
            self._callers = dist.new_group(backend=backend, timeout=2 * limit)  # a rank may wait for its thread, another not
        self._views, self._memory = Views(), HostCopy()
        self._save: Save | None = None
        self._thread = SavingThread()
        self._thread.start()
        self._blocked = 0.0
        self._complete: deque[Saved] = deque()
        self._broken: str | None = None
        self._held = contextlib.ExitStack()

    def save(self, step: int, actor: Actor, run_state: Mapping[str, Any], best: int | None = None) -> None:
        """Begin to write the state as it is now. Returns once it is copied to host memory; training may go on.

        A save still under way is waited for first. run_state: plain JSON; best: a step whose checkpoint is
        not to be deleted; of both, rank 0's count. With `checkpoint.asynchronous` false
        the checkpoint is complete when this returns. With `checkpoint.hf` the model is written for transformers before.

        Raises CheckpointError, on every rank, when the former save failed or the model for transformers cannot be written. What
        else goes wrong with this one is told by what waits for it: `poll`, `wait`, `close`, the next `save`.
        """
        start = time.perf_counter()
        self._settle()
        if self._broken is not None:
            raise CheckpointError(f"no more checkpoints can be written in this run: {self._broken}")
        # All else that must be known is asked beside the copying, which leaves it the interpreter: also whether what is copied
        # is the state still. If not, the state is copied again.
        before = self._views.boxes
        asked = self._thread.ask(
            lambda: (self._views.of(actor), generators.capture(), self._commit(step, actor, run_state, best))
        )
        copies = self._memory.take(before)
        (boxes, objects), states, commit = asked.result()
        if boxes is not before:
            copies = self._memory.take(boxes)
        if self._cfg.hf:
            make_room(self._folder, step, commit.refused if commit else None, self._callers)
            actor.export_hf(folders.partial(self._folder, step) / "hf")
        content = Content(copies, objects, restoring.rng_name(self._groups.rank, self._groups.world_size), states)
        self._save = Save(self._folder, step, content, commit, self._plans, self._cfg.hf, start)
        self._thread.begin(self._save)
        self._blocked = time.perf_counter() - start
        if not self._cfg.asynchronous:
            self._settle()

    def poll(self) -> Saved | None:
        """A checkpoint that became complete and was not told of yet, or None.

        Collectives while a save is under way: one all-reduce of a number. Raises CheckpointError, on every rank, when the save
        failed.
        """
        if self._save is not None and all_true(self._save.is_over(), self._callers):
            self._finish(self._save)
        return self._complete.popleft() if self._complete else None

    def wait(self) -> Saved | None:
        """As `poll`, once the save under way has ended, or has had `checkpoint.timeout_seconds` to do so."""
        self._settle()
        return self._complete.popleft() if self._complete else None

    def newest(self) -> Found | None:
        """The newest checkpoint whose every byte is as it was written; None where the folder holds none at all.

        It is safe from deletion until `load`. Raises CheckpointError, naming each and what is wrong, when none is valid.
        """
        return restoring.newest(self._folder, self._callers, self._held)

    def load(self, found: Found, actor: Actor) -> dict[str, Any]:
        """Bring the actor, on whichever layout, into the state that was saved, and return the run state.

        On the layout that saved it the run goes on bit for bit. On another the random generators start anew, which a warning
        says. The learning rate's schedule goes on in its steps; its rates are those of the config now.

        Raises CheckpointError, on every rank, for the checkpoint of another model or precision.
        """
        try:
            restoring.restore(found, actor, self._groups, self._callers)
        finally:
            self._held.close()
        return found.run_state

    def close(self) -> None:
        """Wait for the save under way; no other can follow. Raises CheckpointError when it failed."""
        self._held.close()
        self._thread.end()
        self._settle()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        """After an error the save under way gets a minute more, without which the error would cost a checkpoint too."""
        if kind is None:
            self.close()
            return
        self._held.close()
        self._thread.end()
        if self._save is not None:
            self._save.wait(min(_FAREWELL_SECONDS, self._cfg.timeout_seconds))

    def _commit(self, step: int, actor: Actor, run_state: Mapping[str, Any], best: int | None) -> Commit | None:
        """On rank 0."""
        if not self._groups.is_main:
            return None
        common = {
            "iteration": step,
            "checkpoint_version": 3.0,  # Megatron's own number for the names in it
            "optimizer": optimizer.common_state(actor.optimizer),
            "opt_param_scheduler": actor.scheduler.state_dict(),
            "content_metadata": CONTENT,
        }
        run, refused = b"", None
        try:
            run = restoring.describe_run(step, actor, run_state)
        except (TypeError, ValueError) as e:
            refused = str(e)
        return Commit(copy.deepcopy(common), run, refused, self._cfg.keep_last, self._cfg.keep_every, best)

    def _settle(self) -> None:
        """Wait for the save under way, if any."""
        if self._save is not None:
            self._save.wait(max(0.0, self._save.begun + self._cfg.timeout_seconds - time.perf_counter()))
            self._finish(self._save)

    def _finish(self, save: Save) -> None:
        """The outcome, on which all ranks agree."""
        self._save = None
        limit = self._cfg.timeout_seconds
        late = Outcome(error=f"rank {self._groups.rank}: still writing after {limit:g} s", broken=True)
        outcomes = from_all(save.outcome or late, self._callers)
        errors = [o.error for o in outcomes if o.error is not None]
        path = folders.complete(self._folder, save.step)
        if any(o.broken for o in outcomes):
            self._broken = errors[0]
        if errors:
            raise CheckpointError(f"{path} was not written: {errors[0]}")
        seconds = save.ended - save.started
        blocked = self._blocked if self._cfg.asynchronous else seconds
        self._complete.append(Saved(save.step, path, outcomes[0].size, blocked, seconds))
