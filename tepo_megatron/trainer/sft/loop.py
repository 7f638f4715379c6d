"""The updates of supervised fine-tuning. Every rank runs them; rank 0 reads the data and writes the log."""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tepo_megatron.actor.actor import Actor
from tepo_megatron.base.errors import DataError, RunStopped
from tepo_megatron.base.save_requests import STOP, answer_stop, answer_trace, asked, take_trace
from tepo_megatron.base.storage import replace_file
from tepo_megatron.base.types import Rollout, TrainBatch
from tepo_megatron.checkpoint.checkpoints import Checkpoints
from tepo_megatron.config import Config, DataConfig, SftConfig
from tepo_megatron.config.io import plain
from tepo_megatron.data import load_tokenizer, refuse_changes, tokenizer_digests
from tepo_megatron.dist import parallel
from tepo_megatron.dist.objects import broadcast_object, broadcast_result
from tepo_megatron.dist.platform import Platform
from tepo_megatron.monitor import hang_watchdog
from tepo_megatron.monitor.metrics import Metrics
from tepo_megatron.monitor.run_dir import rename_outcome
from tepo_megatron.monitor.sinks import Column, RunLog
from tepo_megatron.monitor.tracer import Clock
from tepo_megatron.service.batch_memory import BatchMemory
from tepo_megatron.trainer.batch_receiver import BatchReceiver
from tepo_megatron.trainer.sft.conversations import Demonstration, load_all
from tepo_megatron.trainer.sft.settings import CROSS_ENTROPY, TrainingPlan

COLUMNS = (
    Column("loss", "sft/loss", 8, ".4f"),
    Column("held out", "sft/eval_loss", 8, ".4f"),
    Column("grad", "actor/grad_norm", 7, ".2f"),
    Column("pass", "sft/epoch", 5, ".2f"),
    Column("tokens", "sft/learned_tokens", 7, ".0f"),
    Column("padding", "packing/padding_share", 7, ".3f"),
    Column("upd s", "seconds/update", 6, ".2f"),
    Column("tok/s", "tokens_per_second", 7, ".0f"),
)
_OF_UPDATE = ("loss/total", "actor/grad_norm", "packing/computed_tokens", "packing/padding_share")


def fine_tune(cfg: Config, platform: Platform) -> None:
    """Make one run: all updates, checkpoints, the held-out loss, and the export.

    Raises:
        DataError: The conversations cannot be used.
        RunStopped: On rank 0: the run was asked to end (`base/save_requests.py`).
    """
    groups = parallel.initialize(cfg.parallel, platform, cfg.seed, config=plain(cfg))
    seconds = {"heartbeat_timeout": cfg.parallel.heartbeat_timeout, "stuck_seconds": cfg.parallel.stuck_seconds}
    watchdog = hang_watchdog.HangWatchdog(
        parallel.world_store(), groups.rank, groups.world_size, cfg.run_dir, **seconds, on_hang=hang_watchdog.abort
    )
    with watchdog:
        source = ConversationSource.open(
            cfg.sft, cfg.data, cfg.model.path, cfg.rollout.stop_token_ids, cfg.seed, groups, cfg.run_dir
        )
        actor = Actor.open(cfg, groups)
        with (
            Checkpoints.open(cfg.run_dir / "checkpoints", cfg.checkpoint, groups) as checkpoints,
            RunLog(cfg.run_dir, cfg.logging, source.plan.steps, COLUMNS) if groups.is_main else contextlib.nullcontext() as log,
        ):
            stopped_at = FineTuning(cfg, groups, actor, checkpoints, source, log).run()
    is_main = groups.is_main
    parallel.shutdown()
    if stopped_at is not None and is_main:
        raise RunStopped(f"{cfg.run_dir}: ended on request after update {stopped_at}, saved; go on with tepo resume")


@dataclass
class ConversationSource:
    """The conversations, read on rank 0 and brought to all ranks batch by batch."""

    plan: TrainingPlan  # the order of the conversations, the same on all ranks
    held_out: int
    lines: list[str]  # what was read, for the log; empty on ranks other than 0
    groups: parallel.ParallelDims
    batches: BatchReceiver
    memory: BatchMemory
    train: Sequence[Demonstration] = ()
    eval: Sequence[Demonstration] = ()
    # What a resumed run compares, by the name that a refusal gives it
    compared: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        cfg: SftConfig,
        data: DataConfig,
        model_path: str,
        stop_token_ids: Sequence[int],
        seed: int,
        groups: parallel.ParallelDims,
        run_dir: Path,
    ) -> "ConversationSource":
        """Read the data on rank 0. Collectives: one broadcast over the host group, and those of `BatchReceiver.open`. Raises
        DataError: on every rank: the data cannot be used.
        """
        loaded: list[Any] = []

        def load() -> tuple[int, int, dict[str, object]]:
            if not groups.is_main:
                return 0, 0, {}
            tokenizer = load_tokenizer(model_path, run_dir)
            loaded.extend(load_all(cfg, data, model_path, tokenizer, stop_token_ids))
            compared = tokenizer_digests(tokenizer) | {
                "seed": seed,
                "sft.batch_sequences": cfg.batch_sequences,
                "sft.data: its tokens": _digest(loaded[0].conversations),
            }
            return len(loaded[0].conversations), len(loaded[1].conversations) if len(loaded) > 1 else 0, compared

        count, held_out, compared = broadcast_result(load, groups.host)
        plan = TrainingPlan(count, cfg.batch_sequences, cfg.epochs, cfg.steps, seed)
        source = cls(plan, held_out, [part.line for part in loaded], groups, BatchReceiver.open(groups), BatchMemory())
        source.compared = compared
        if loaded:
            source.train = loaded[0].conversations
            source.eval = loaded[1].conversations if len(loaded) > 1 else ()
        return source

    def batch(self, step: int) -> TrainBatch:
        """Return the conversations of an update on every rank. Collectives: those of `BatchReceiver.receive`."""
        return self._share(self.train, self.plan.indices(step))

    def held_out_batches(self) -> Iterator[TrainBatch]:
        """Yield all held-out conversations, in batches, on every rank. Collectives: as `batch`, for each."""
        for start in range(0, self.held_out, self.plan.per_update):
            yield self._share(self.eval, range(start, min(self.held_out, start + self.plan.per_update)))

    def _share(self, conversations: Sequence[Demonstration], indices: Sequence[int]) -> TrainBatch:
        header = None
        if self.groups.is_main:
            header = self.memory.write([_as_rollout(i, conversations[i]) for i in indices], {}, {})
        header = broadcast_object(header, self.groups.host)
        assert header is not None
        rollouts = self.batches.receive(header)
        if self.groups.is_main:
            self.memory.release(header.path)
        # not the first update on a batch: nothing samples, so there is nothing to compare with
        return TrainBatch(tuple(rollouts), torch.ones(len(rollouts)), update=1)


@dataclass
class FineTuning:
    """The updates of a run. All ranks make the same calls."""

    cfg: Config
    groups: parallel.ParallelDims
    actor: Actor
    checkpoints: Checkpoints
    source: ConversationSource
    log: RunLog | None  # the log of the run, on rank 0

    def run(self) -> int | None:
        """Take the updates that are left, then export. Return the last update if a request ended the run before."""
        losses = {}
        begun = saved_at = time.monotonic()
        done = step = saved = self._resume()
        losses["before"] = self._held_out_loss()
        self._say(*self.source.lines)
        was_measured = done > 0 and self.cfg.sft.eval_every > 0 and done % self.cfg.sft.eval_every == 0
        ended = was_measured and self._ends_early(losses["before"])  # as before the resume
        while not ended and step < self.source.plan.steps:
            self._refuse_requests()
            due = self.cfg.checkpoint.is_due(time.monotonic() - saved_at)
            stop, due = broadcast_object((self.groups.is_main and asked(self.cfg.run_dir, STOP), due), self.groups.host)
            if stop:
                return self._stop(step, saved)
            step += 1
            ended = self._ends_early(self._update(step))
            every = self.cfg.checkpoint.steps
            last = step == self.source.plan.steps or ended
            if due or (every and step % every == 0) or (last and (every or saved)):
                self._save(step)
                saved, saved_at = step, time.monotonic()
            self._log_checkpoint(self.checkpoints.poll())
        self._log_checkpoint(self.checkpoints.wait())
        if self.cfg.export_hf:
            self.actor.export_hf(self.cfg.run_dir / "hf", self._check_in_place)
        losses["after"] = self._held_out_loss()
        if self.groups.is_main:
            summary = {"steps": step, "seconds": time.monotonic() - begun, "held_out_loss": losses}
            replace_file(self.cfg.run_dir / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
        self._say(*(f"held-out loss {when}: {loss:.4f} nats per token" for when, loss in losses.items() if loss is not None))
        return None

    def _resume(self) -> int:
        """Restore the newest checkpoint if the run is resumed. Return its update; 0 without one."""
        if not broadcast_object(self.cfg.resume, self.groups.host):
            return 0
        newest = self.checkpoints.newest()
        state = None if newest is None else self.checkpoints.load(newest, self.actor)
        step = 0 if state is None else int(state["step"])
        if state is not None and state["conversations"] != self.source.plan.conversations:
            raise DataError(
                f"sft.data={self.cfg.sft.data}: {self.source.plan.conversations} conversations, and the checkpoint of update "
                f"{step} was made with {state['conversations']}; resume with the same data, sft.max_tokens and tokenizer"
            )
        if state is not None:
            refuse_changes(state.get("compared", {}), self.source.compared)
        if self.log is not None:
            rename_outcome(self.cfg.run_dir)
            self._say(f"resume: from the checkpoint of update {step}" if step else "resume: no checkpoint yet")
            self._say(*(f"resume: {line}" for line in self.log.rewind(step)))
        return step

    def _ends_early(self, held_out: float | None) -> bool:
        """Return whether the held-out loss ends the run. Collectives: one broadcast, if the config has such an end."""
        limit = self.cfg.sft.stop_at_loss
        if limit is None:
            return False
        ends: bool = broadcast_object(held_out is not None and held_out <= limit, self.groups.host)
        if ends:
            self._say(f"the held-out loss of {held_out:.4f} is at most sft.stop_at_loss={limit:g}: training ends")
        return ends

    def _update(self, step: int) -> float | None:
        """Take one update and log it. Return the held-out loss, if it was due."""
        clock, metrics = Clock(), Metrics()
        hang_watchdog.progress.step = step
        batch = self.source.batch(step)
        self.actor.start_step(step)
        with clock.phase("update"):
            result = self.actor.update(batch, CROSS_ENTROPY)
            self.actor.finish_step()
        due = self.cfg.sft.eval_every and step % self.cfg.sft.eval_every == 0 and step < self.source.plan.steps
        with clock.paused():
            held_out = self._held_out_loss() if due else None
        if self.log is None:
            return held_out
        for name in _OF_UPDATE:
            metrics.add(name.replace("loss/total", "sft/loss"), *result.metrics[name])
        record: dict[str, float | None] = metrics.means() | {
            "sft/eval_loss": held_out,
            "sft/epoch": step / self.source.plan.updates_per_epoch,
            "sft/learned_tokens": float(batch.num_tokens),
            "seconds/update": clock.seconds["update"],
            "seconds/total": clock.total,
            "tokens_per_second": sum(batch.lengths) / clock.total,
        }
        self.log.write(step, record)
        return held_out

    def _held_out_loss(self) -> float | None:
        """Return the mean cross-entropy of the held-out tokens, nats. None: there are none. Collectives: forward passes."""
        total, tokens = torch.zeros(1, dtype=torch.float64, device=self.groups.device), 0
        for batch in self.source.held_out_batches():
            logprobs_N = self.actor.logprobs(batch, replays=False)
            if self.groups.is_last_stage:
                total -= logprobs_N.double().sum()
            tokens += batch.num_tokens
        return float(self.groups.broadcast_from_last_stage(total)) / tokens if tokens else None

    def _save(self, step: int) -> None:
        if self.log is not None:
            self.log.sync()
        state = {"step": step, "conversations": self.source.plan.conversations, "compared": dict(self.source.compared)}
        self.checkpoints.save(step, self.actor, state)

    def _refuse_requests(self) -> None:
        """Answer a request of `tepo trace`: there is no service, which would merge a trace."""
        if self.groups.is_main and take_trace(self.cfg.run_dir) is not None:
            answer_trace(self.cfg.run_dir, "refused: tepo sft has no rollout service, whose steps are traced")

    def _stop(self, step: int, saved: int) -> int:
        if step > saved:
            self._save(step)
        self._log_checkpoint(self.checkpoints.wait())
        if self.groups.is_main:
            answer_stop(self.cfg.run_dir)
        return step

    def _log_checkpoint(self, saved: Any) -> None:
        if saved is not None:
            self._say(f"checkpoint of update {saved.step}: complete after {saved.seconds:.1f} s")

    def _check_in_place(self) -> None:
        if self.log is not None:
            self.log.check_in_place()

    def _say(self, *lines: str) -> None:
        if self.log is not None:
            for line in lines:
                self.log.message(line)


def _digest(conversations: Sequence[Demonstration]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for conversation in conversations:
        digest.update(repr((conversation.token_ids_L.tolist(), conversation.learned_mask_L.tolist())).encode())
    return digest.hexdigest()


def _as_rollout(number: int, conversation: Demonstration) -> Rollout:
    ids, mask = conversation.token_ids_L, conversation.learned_mask_L
    return Rollout(number, ids, mask, torch.zeros(ids.numel()), policy_version=0, stop_reason="stop")
