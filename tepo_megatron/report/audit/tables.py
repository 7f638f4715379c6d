"""Audits as text, which `tepo audit` prints: a step with its sums and largest losses, or one token with all of its numbers."""

import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tepo_megatron.base.errors import CheckpointError, ConfigError, DataError, escaped
from tepo_megatron.config.io import load_config
from tepo_megatron.data import load_tokenizer
from tepo_megatron.report.audit.comparison import SUM_TOLERANCE, TOLERANCE, AuditedStep, AuditedUpdate, audit_step
from tepo_megatron.report.audit.reading import AuditBatch

LARGEST = 8  # tokens that the table of a step lists
# name of a term -> its name in tables
TERMS = {
    "rollout_logprob": "log-prob of the engine, nats", "old_logprob": "log-prob of the old policy, nats",
    "teacher_kl": "KL to the teacher over the vocabulary, nats",
    "logprob": "log-prob now, nats", "ref_logprob": "log-prob of the reference, nats", "entropy": "entropy now, nats",
    "old_entropy": "entropy of the old policy, nats", "entropy_change": "entropy change dH, nats",
    "group_advantage": "advantage in its group", "advantage": "advantage with entropy", "ratio": "importance ratio",
    "clipped": "clipped", "correction": "rollout/train correction", "weight": "weight of the weighting",
    "penalty": "penalty of the weighting", "kl_mask": "under the KL mask", "kl": "KL to the old policy, nats",
    "ref_kl": "KL to the reference, nats", "share": "share in the loss, 1/D", "loss": "part of the loss",
}  # fmt: skip
DECISIONS = ("clipped", "kl_mask")

TokenName = Callable[[int], str]  # token id -> how it is shown


def value_of(name: str, value: float) -> str:
    """Return a number as a table cell; decisions are yes and no."""
    return ("yes" if value else "no") if name in DECISIONS else f"{value:.9g}"


def terms_of(update: AuditedUpdate, index: int) -> Iterator[tuple[str, float, float | None]]:
    """Yield (name, what training used, what the audit computed) of one token. None: an input, of which there is one value."""
    for name in TERMS:
        if name in update.used and name in update.terms:
            yield name, float(update.used[name][index]), float(update.terms[name][index])
        elif name in update.record.inputs:
            yield name, float(update.record.inputs[name][index]), None


def step_lines(audited: AuditedStep) -> Iterator[str]:
    """Yield the lines about a step: its sums, the largest difference of each term, and the tokens with the largest losses."""
    batch, updates = audited.batch, audited.updates
    tokens = sum(update.near_N.size for update in updates)
    yield f"step {audited.step}: {len(updates)} updates, {len(batch)} sequences, {tokens} token losses"
    yield objective_in_words(updates[0])
    yield f"{'update':>8}{'tokens':>9}{'loss of training':>19}{'sum over tokens':>19}{'difference':>12}{'at a threshold':>16}"
    for update in updates:
        record = update.record
        yield (
            f"{record.number:>8}{update.near_N.size:>9}{record.loss:>19.9g}{update.loss:>19.9g}"
            f"{abs(update.loss - record.loss):>12.1e}{update.decided_differently:>16}"
            f"{'' if update.sums_agree else '   DIFFERS'}"
        )
    yield from _logged(audited)
    yield "largest difference of each term, relative to its largest value (tokens at a threshold left out):"
    for name in (name for name in TERMS if name in updates[0].used):
        worst = max(update.difference(name) if name in update.terms else math.inf for update in updates)
        yield f"  {TERMS[name]:<36}{worst:>10.1e}{'' if worst <= TOLERANCE else '   DIFFERS'}"
    yield "tokens with the largest losses (--token SEQUENCE:POSITION shows all of one):"
    for update, index in _largest(updates):
        record = update.record
        place = f"{record.sequence_N[index]}:{record.position_N[index]}"
        yield f"  {place:<12} update {record.number:<4} loss {update.terms['loss'][index]:+.6g}"


def token_lines(audited: AuditedStep, sequence: int, position: int, token_name: TokenName = str) -> Iterator[str]:
    """Yield the lines about one token: where it comes from, its group, and every number of its loss in each update. Raises
    DataError if the step has no such token.
    """
    batch = audited.batch
    if not 0 <= sequence < len(batch):
        raise DataError(f"step {audited.step} has the sequences 0 to {len(batch) - 1}, and not {sequence}")
    length = int(batch.response_lengths_B[sequence])
    if not 0 <= position < length:
        has = (
            f"the tokens 0 to {length - 1}"
            if length
            else "no response token (it was cut off, and objective.mask_truncated is on)"
        )
        raise DataError(f"the response of sequence {sequence} in step {audited.step} has {has}, and not {position}")
    index = int(batch.response_L[batch.first_B[sequence] + position])
    yield (
        f"step {audited.step}, sequence {sequence} (prompt {batch.prompt_ids_B[sequence]}), token {position} of {length}: "
        f"{token_name(int(batch.token_ids_L[index]))}"
    )
    yield f"weights of version {batch.versions_L[index]} sampled it"
    yield from group_lines(batch, sequence)
    for update in audited.updates:
        place = update.record.find(sequence, position)
        if place is None:
            yield f"update {update.record.number}: the sequence was not in this minibatch"
            continue
        yield f"update {update.record.number}, {objective_in_words(update)}"
        yield f"  {'':<36}{'training used':>18}{'in fp64':>18}{'difference':>12}"
        for name, used, computed in terms_of(update, place):
            apart = (
                ""
                if computed is None
                else f"{computed - used:.1e}"
                if name not in DECISIONS
                else " " * (used == computed) or "!"
            )
            again = "" if computed is None else value_of(name, computed)
            yield f"  {TERMS[name]:<36}{value_of(name, used):>18}{again:>18}{apart:>12}".rstrip()
        if update.near_N[place]:
            yield "  a number of it is so near to a threshold that fp32 may decide differently"
    yield from _logged(audited)


def group_lines(batch: AuditBatch, sequence: int) -> Iterator[str]:
    """Yield a line about the rewards of a sequence's group."""
    group = batch.group(sequence)
    rewards = batch.rewards_B[group]
    spread = f", deviation {rewards.std(ddof=1):.6g}" if len(group) > 1 else ""
    listed = " ".join(f"[{r:.6g}]" if i == sequence else f"{r:.6g}" for i, r in zip(group, rewards, strict=True))
    yield f"rewards of its group of {len(group)}: {listed}; mean {rewards.mean():.6g}{spread}"


def objective_in_words(update: AuditedUpdate) -> str:
    """Return the parts of the loss in a few words."""
    o, n = update.record.objective, len(update.record.sequences)
    parts = [f"ratio {o.ratio}", f"surrogate {o.surrogate}", f"clip [{1 - o.clip_low:.6g}, {1 + o.clip_high:.6g}]"]
    parts += [f"beta {o.beta:g} {o.kl} on {o.kl_mask}"] if o.beta else []
    return ", ".join([*parts, f"{o.aggregate} over {update.near_N.size} tokens of {n} sequences"])


def relative(a: float, b: float) -> float:
    """Return |a - b| / |b|; 0 where both are 0."""
    return abs(a - b) / abs(b) if b else (0.0 if a == b else math.inf)


def _logged(audited: AuditedStep) -> Iterator[str]:
    if audited.logged_loss is None:
        yield "metrics.jsonl has no loss of this step, so the sums were compared with the losses of the ranks alone"
        return
    apart = abs(audited.loss - audited.logged_loss)
    of_terms = apart / audited.magnitude if audited.magnitude else 0.0
    yield (
        f"loss/total in metrics.jsonl: {audited.logged_loss:.9g}; mean over updates of the sums: {audited.loss:.9g}; "
        f"difference {relative(audited.loss, audited.logged_loss):.1e} of the loss, {of_terms:.1e} of the sum of "
        f"absolute token losses"
        f"{'' if of_terms <= SUM_TOLERANCE else ': DIFFERS'}"
    )


def _largest(updates: list[AuditedUpdate]) -> list[tuple[AuditedUpdate, int]]:
    candidates = [(update, int(i)) for update in updates for i in np.argsort(-np.abs(update.terms["loss"]))[:LARGEST]]
    return sorted(candidates, key=lambda pair: -abs(pair[0].terms["loss"][pair[1]]))[:LARGEST]


def parse_token(text: str) -> tuple[int, int]:
    """Return (sequence, position) of SEQUENCE:POSITION. Raises ConfigError for another text."""
    sequence, _, position = text.partition(":")
    if not (sequence.isascii() and sequence.isdigit() and position.isascii() and position.isdigit()):
        raise ConfigError(f"--token {text}: two whole numbers, SEQUENCE:POSITION, such as 5:0")
    return int(sequence), int(position)


def audit_lines(run_dir: Path, step: int, token: str | None) -> tuple[list[str], bool]:
    """Audit a step; return the lines to print, and whether everything agrees.

    Args:
        token: The token to show, SEQUENCE:POSITION. None: the whole step.
    Raises:
        ConfigError: `token` is no such text.
        DataError: The run kept too little, its records are damaged, or it has no such token.
    """
    place = None if token is None else parse_token(token)
    audited = audit_step(run_dir, step)
    lines = step_lines(audited) if place is None else token_lines(audited, *place, _token_names(run_dir))
    verdict = "everything agrees" if audited.agrees else "training and audit DIFFER, see above"
    return [*map(escaped, lines), verdict], audited.agrees


def print_audit(run_dir: Path, step: int, token: str | None) -> int:
    """Print what `audit_lines` returns; return the exit status: 1 if something differs."""
    lines, agrees = audit_lines(run_dir, step, token)
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # the reader has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if agrees else 1


def _token_names(run_dir: Path) -> TokenName:
    """Return a function that shows a token's id and, if a tokenizer is found, its text."""
    try:
        tokenizer = load_tokenizer(load_config(run_dir / "config.yaml").model.path)
    except (CheckpointError, ConfigError):
        return lambda token: f"id {token}"
    return lambda token: f"id {token}, {tokenizer.decode([token])!r}"
