"""Samples of a run to read: the best, worst and longest of the first and last recorded step, and those that changed.

Token ids and untrusted text are split into spans that a page can show: no invisible characters, no endless text.
"""

import itertools
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tepo_megatron.base.errors import CheckpointError, DataError
from tepo_megatron.report.run import RunRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tepo_megatron.base.types import Rollout

KEPT = 6000  # characters kept at each end of a text longer than twice that
# Control characters, marks that change the direction of text, zero-width spaces, lone surrogates. Zero-width joiners are not
# among them: some scripts need them.
_INVISIBLE = re.compile(r"([\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff])")


@dataclass(frozen=True)
class TextSpan:
    """A piece of text of one kind."""

    # "prompt"; "response" (chosen by the policy); "context" (text that something else inserted into the response); "special" (a
    # token that is not text); "control" (the name of an invisible character); "cut" (how much was left out); or "text"
    kind: str
    text: str


def of_text(text: str, kind: str) -> list[TextSpan]:
    """Return `text` in pieces, with invisible characters replaced by their names."""
    parts = _INVISIBLE.split(text)
    pieces = [TextSpan("control", f"U+{ord(p):04X}") if i % 2 else TextSpan(kind, p) for i, p in enumerate(parts)]
    return [piece for piece in pieces if piece.text]


def of_tokens(
    token_ids: Sequence[int], response_mask: Sequence[bool], tokenizer: "PreTrainedTokenizerBase | None"
) -> tuple[list[TextSpan], list[TextSpan]]:
    """Return (prompt, what came after it) of one sequence in pieces. Without a tokenizer the pieces hold the ids."""
    start = list(response_mask).index(True) if any(response_mask) else len(token_ids)
    marks = [("prompt" if i < start else "response" if chosen else "context") for i, chosen in enumerate(response_mask)]
    pieces: list[list[TextSpan]] = [[], []]
    for (kind, special), group in itertools.groupby(
        zip(token_ids, marks, strict=True), key=lambda pair: (pair[1], _is_special(pair[0], tokenizer))
    ):
        ids = [token for token, _ in group]
        if special and tokenizer is not None:
            spans = [TextSpan("special", str(tokenizer.convert_ids_to_tokens(token) or f"token {token}")) for token in ids]
        elif tokenizer is not None:
            text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            spans = of_text(str(text), kind)
        else:
            spans = [TextSpan(kind, " ".join(map(str, ids)) + " ")]
        pieces[kind != "prompt"] += spans
    return pieces[0], pieces[1]


def shortened(pieces: Sequence[TextSpan], kept: int = KEPT) -> list[TextSpan]:
    """Return the first and last `kept` characters, with a piece between them that says how many were left out."""
    length = sum(len(piece.text) for piece in pieces)
    if length <= 2 * kept:
        return list(pieces)
    head = list(_first(pieces, kept))
    tail = [TextSpan(p.kind, p.text[::-1]) for p in _first(((TextSpan(p.kind, p.text[::-1])) for p in reversed(pieces)), kept)]
    return [*head, TextSpan("cut", f"{length - 2 * kept:,} characters left out"), *reversed(tail)]


def _first(pieces: Iterable[TextSpan], limit: int) -> Iterator[TextSpan]:
    for piece in pieces:
        if limit <= 0:
            return
        yield TextSpan(piece.kind, piece.text[:limit])
        limit -= len(piece.text)


def _is_special(token: int, tokenizer: "PreTrainedTokenizerBase | None") -> bool:
    """Return whether the token is an added token (<|im_end|>, <think>, ...) or an id beyond the vocabulary."""
    if tokenizer is None:
        return False
    return token in tokenizer.added_tokens_decoder or token in tokenizer.all_special_ids or token >= len(tokenizer)


MOST_CHANGED = 3  # prompts shown


@dataclass(frozen=True)
class ReportSample:
    """One response to show, under the reason for which it is shown. `prompt`: empty if it is not shown."""

    title: str
    right: bool
    facts: Sequence[str]
    answer: str
    prompt: Sequence[TextSpan]
    response: Sequence[TextSpan]


@dataclass(frozen=True)
class SampleGroup:
    """Samples under one heading."""

    title: str
    samples: Sequence[ReportSample]


@dataclass(frozen=True)
class ReportSamples:
    """Groups of samples, and one sentence for each thing that is missing and why."""

    groups: Sequence[SampleGroup]
    notes: Sequence[str]


def read_samples(run: RunRecord) -> ReportSamples:
    """Read samples from the rollouts that a run recorded or replayed. A file that cannot be read becomes a note."""
    folder = read_folder(run)
    if not folder.is_dir():
        return ReportSamples((), ["No samples were kept: rollout.record=true keeps the rollouts of each step."])
    from tepo_megatron.rollout import record  # imports torch

    steps = record.steps(folder)
    if not steps:
        return ReportSamples((), [f"{folder.name}/ holds no recorded step yet."])
    notes = ["Recorded are the rollouts that steps learned from: groups all right or all wrong may have been left out."]
    tokenizer = find_tokenizer(run, notes)
    groups: list[SampleGroup] = []
    try:
        ends = {step: record.read(folder, step)[0] for step in dict.fromkeys((steps[0], steps[-1]))}
        groups += [_of_step(step, rollouts, tokenizer) for step, rollouts in ends.items() if rollouts]
        changed = _changed(folder, steps)
        if not changed:
            notes.append("No prompt was recorded at two steps, so no responses to the same prompt can be compared.")
        for prompt, first, last in changed:
            pair = [(step, [r for r in record.read(folder, step)[0] if r.prompt_id == prompt]) for step in (first, last)]
            groups.append(_of_prompt(prompt, pair, tokenizer))
    except DataError as e:
        notes.append(str(e))
    return ReportSamples(groups, notes)


def read_folder(run: RunRecord) -> Path:
    """Return the folder of the rollouts that a run recorded or, if it recorded none, replayed. It need not exist."""
    replayed, folder = run.cfg.rollout.replay, run.folder / "rollouts"
    return folder if replayed is None or folder.is_dir() else Path(replayed)


def find_tokenizer(run: RunRecord, notes: list[str]) -> "PreTrainedTokenizerBase | None":
    """Load the model's tokenizer or, if the model has moved, the exported model's."""
    from tepo_megatron.data import load_tokenizer

    missing = []
    for path in (run.cfg.model.path, run.folder / "hf"):
        try:
            return load_tokenizer(path)
        except CheckpointError as e:
            missing.append(str(e))
    notes.append(f"Token ids are shown, because there is no tokenizer: {missing[0]}")
    return None


def _of_step(step: int, rollouts: "Sequence[Rollout]", tokenizer: "PreTrainedTokenizerBase | None") -> SampleGroup:
    """Return the best, worst and longest rollouts of a step. Among equal rewards the shorter response is better."""
    order = sorted(rollouts, key=lambda r: (r.reward, -r.response_length))
    chosen = (("best", order[-1]), ("worst", order[0]), ("longest", max(rollouts, key=lambda r: r.response_length)))
    titles: dict[int, list[str]] = {}  # one rollout may have several titles
    for title, rollout in chosen:
        titles.setdefault(id(rollout), []).append(title)
    by_id = {id(rollout): rollout for _, rollout in chosen}
    return SampleGroup(f"step {step}", [sample_of(", ".join(labels), by_id[key], tokenizer) for key, labels in titles.items()])


def _changed(folder: Path, steps: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (prompt id, first step, last step) of the prompts whose mean score changed most between these steps."""
    from tepo_megatron.rollout import record

    seen: dict[int, list[tuple[int, float]]] = {}
    for step in steps:
        rows = sorted(record.scores(folder, step), key=lambda row: row[0])
        for prompt, group in itertools.groupby(rows, key=lambda row: row[0]):
            seen.setdefault(prompt, []).append((step, statistics.fmean(score for _, score in group)))
    changes = {p: abs(scores[-1][1] - scores[0][1]) for p, scores in seen.items() if len(scores) > 1}
    return [(p, seen[p][0][0], seen[p][-1][0]) for p in sorted(changes, key=lambda p: -changes[p])[:MOST_CHANGED]]


def _of_prompt(
    prompt: int, pair: "Sequence[tuple[int, Sequence[Rollout]]]", tokenizer: "PreTrainedTokenizerBase | None"
) -> SampleGroup:
    """Return, for each step, the sample whose score is nearest its group's mean."""
    samples, means = [], []
    for step, rollouts in pair:
        mean = statistics.fmean(r.score for r in rollouts)
        means.append(f"{mean:.3g}")
        typical = min(rollouts, key=lambda r: abs(r.score - mean))
        samples.append(sample_of(f"step {step}, mean score {mean:.3g} of {len(rollouts)}", typical, tokenizer))
    return SampleGroup(f"most changed: prompt {prompt}, {' → '.join(means)}", samples)


def sample_of(title: str, rollout: "Rollout", tokenizer: "PreTrainedTokenizerBase | None") -> ReportSample:
    """Return a rollout as text with its facts. Without a tokenizer token ids are shown."""
    prompt, response = of_tokens(rollout.token_ids_L.tolist(), rollout.response_mask_L.tolist(), tokenizer)
    mean_logprob = rollout.rollout_logprobs_L[rollout.response_mask_L].mean().item() if rollout.response_length else 0.0
    facts = [
        f"reward {rollout.reward:.3g}",
        rollout.status,
        f"{rollout.response_length} tokens",
        *(["cut off at the length limit"] if rollout.stop_reason == "length" else []),
        f"mean log-prob {mean_logprob:.2f}",
        f"weights of step {rollout.policy_version}",
    ]
    if rollout.score != rollout.reward:
        facts.insert(1, f"score {rollout.score:.3g}")
    return ReportSample(title, rollout.score > 0.5, facts, rollout.answer, shortened(prompt), shortened(response))
