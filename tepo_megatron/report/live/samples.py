"""Samples of a run and the numbers of their tokens, one page and one sample at a time."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tepo_megatron.monitor.run_dir import audit_folder
from tepo_megatron.report.audit.reading import read_batch, read_update
from tepo_megatron.report.chart import rounded
from tepo_megatron.report.run import RunRecord
from tepo_megatron.report.samples import (
    ReportSample,
    TextSpan,
    find_tokenizer,
    of_text,
    of_tokens,
    read_folder,
    sample_of,
    shortened,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tepo_megatron.base.types import Rollout

PAGE = 4  # samples of a page
TOKENS = 1000  # tokens of a page
LONGEST_TOKEN = 200  # characters shown of one token
ORDERS = ("recorded", "best", "worst", "longest")
KEEP_TOKENS = "The numbers of this step's tokens were not kept: logging.audit_every=10 keeps them in every tenth step."
KEEP_SAMPLES = "No samples were kept: rollout.record=true keeps the rollouts of each step."


class SampleReader:
    """Reads samples of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._notes: list[str] = []
        self._model = ""  # whose tokenizer is loaded

    def page(self, run: RunRecord, step: int | None, order: str, page: int) -> dict[str, Any]:
        """Return some samples as JSON, of the recorded step that is nearest to `step`. None: of the last one.

        Raises DataError if the recording is missing or damaged.
        """
        from tepo_megatron.rollout import record  # imports torch

        folder = read_folder(run)
        known = record.steps(folder)
        if not known:
            return {"steps": 0, "notes": [KEEP_SAMPLES], "samples": []}
        place = len(known) - 1 if step is None else int(np.abs(np.array(known) - step).argmin())
        step = known[place]
        rewards = np.array(record.column(folder, step, "reward"))
        chosen = _ordered(rewards, order, lambda: record.column(folder, step, "length"))
        pages = max(1, -(-len(chosen) // PAGE))
        page = min(max(page, 0), pages - 1)
        places = chosen[page * PAGE : (page + 1) * PAGE]
        tokenizer = self._load(run)
        samples = [
            {"place": i, **_plain(sample_of(f"sample {i}, prompt {rollout.prompt_id}", rollout, tokenizer))}
            for i, rollout in zip(places, record.read_some(folder, step, places), strict=True)
        ]
        near = {"before": known[place - 1] if place else None, "after": known[place + 1] if place + 1 < len(known) else None}
        return {
            "step": step, "steps": len(known), "page": page, "pages": pages, **near,
            "mean": round(float(rewards.mean()), 4) if len(rewards) else None, "notes": self._notes, "samples": samples,
        }  # fmt: skip

    def tokens(self, run: RunRecord, step: int, place: int, first: int) -> dict[str, Any]:
        """Return the tokens of one sample's response with their numbers, as JSON.

        Raises DataError if a file is missing or damaged, or has no such sample.
        """
        from tepo_megatron.rollout import record  # imports torch

        (rollout,) = record.read_some(read_folder(run), step, [place])
        ids, mask = rollout.token_ids_L.numpy(), rollout.response_mask_L.numpy().astype(bool)
        sequence, values, note = self._values(run, step, rollout, place)
        engine = rollout.rollout_logprobs_L.numpy().astype(np.float64)[mask]
        numbers = {**values, "log-prob of the engine": engine}
        count, tokenizer = int(mask.sum()), self._load(run)
        end = min(count, first + TOKENS)
        return {
            "place": place, "step": step, "sequence": sequence, "first": first, "count": count, "note": note,
            "tokens": [_spans(_of_token(int(token), tokenizer)) for token in ids[mask][first:end]],
            "ids": ids[mask][first:end].tolist(),
            "numbers": {name: rounded(x[first:end]) for name, x in numbers.items() if len(x) == count},
        }  # fmt: skip

    def _values(
        self, run: RunRecord, step: int, rollout: "Rollout", place: int
    ) -> tuple[int | None, dict[str, np.ndarray], str]:
        """Return the sample's index in the audited step, its numbers by name, and a sentence if there are none."""
        folder = audit_folder(run.folder, step)
        if not folder.is_dir():
            return None, {}, KEEP_TOKENS
        batch = read_batch(folder)
        sequence = batch.sequence_of(rollout.prompt_id, rollout.token_ids_L.numpy(), place)
        for number in reversed(range(0 if sequence is None else batch.updates)):
            update = read_update(folder, number, batch)
            here = np.flatnonzero(update.sequence_N == sequence)
            if here.size:
                names = {"advantage": "advantage", "ratio": "ratio", "entropy change": "entropy_change"}
                values = {name: update.used[key][here] for name, key in names.items()}
                mismatch = update.inputs["old_logprob"][here] - update.inputs["rollout_logprob"][here]
                return sequence, {**values, "mismatch": mismatch}, ""
        return None, {}, "The step did not train on this sample."

    def _load(self, run: RunRecord) -> "PreTrainedTokenizerBase | None":
        if self._model != run.cfg.model.path:
            self._notes = []
            self._tokenizer, self._model = find_tokenizer(run, self._notes), run.cfg.model.path
        return self._tokenizer


def _ordered(rewards: np.ndarray, order: str, lengths: Callable[[], Sequence[float]]) -> list[int]:
    if order == "longest":
        return [int(i) for i in np.argsort(-np.array(lengths()), kind="stable")]
    if order in ("best", "worst"):
        return [int(i) for i in np.argsort(-rewards if order == "best" else rewards, kind="stable")]
    return list(range(len(rewards)))


def _of_token(token: int, tokenizer: "PreTrainedTokenizerBase | None") -> list[TextSpan]:
    return shortened([span for side in of_tokens([token], [True], tokenizer) for span in side], LONGEST_TOKEN)


def _spans(spans: Iterable[TextSpan]) -> list[list[str]]:
    return [[span.kind, span.text] for span in spans]


def _plain(sample: ReportSample) -> dict[str, Any]:
    answer = shortened(of_text(sample.answer, "text"))
    return {
        "title": sample.title, "right": sample.right, "facts": list(sample.facts), "answer": _spans(answer),
        "prompt": _spans(sample.prompt), "response": _spans(sample.response),
    }  # fmt: skip
