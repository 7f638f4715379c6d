"""Tokens of the last audited step, coloured by their part of the loss, with every number of each for `page.js` to show."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tepo_megatron.base.errors import DataError
from tepo_megatron.report.run import RunRecord
from tepo_megatron.report.samples import TextSpan, find_tokenizer, of_tokens, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tepo_megatron.report.audit.comparison import AuditedStep

SAMPLES = 4  # sequences shown
TOKENS = 400  # tokens shown of each
LEVELS = 4  # shades of a colour

ENABLE = "No numbers of single tokens were kept: --logging.audit_every 10 keeps them in every tenth step, for tepo audit too."


@dataclass(frozen=True)
class TokenCell:
    """One token."""

    pieces: Sequence[TextSpan]
    shade: str  # CSS class: "up3" if its part of the loss is negative, "down3" if it is positive, "" if it is 0; 1 to LEVELS


@dataclass(frozen=True)
class TokenSample:
    """One response with its tokens."""

    title: str
    facts: Sequence[str]
    right: bool
    prompt: Sequence[TextSpan]
    cells: Sequence[TokenCell]
    left_out: int  # number of tokens after these
    # For `page.js`: `names` of the terms; for each token the title `place` and for each update its number, and (index of the
    # name, what training used, what the audit computed or "") of each term
    numbers: dict[str, Any]


@dataclass(frozen=True)
class TokenPanel:
    """Audited tokens of a run."""

    summary: Sequence[str]
    agrees: bool
    samples: Sequence[TokenSample]  # the sequences that weigh most in the loss
    notes: Sequence[str]


def read_tokens(run: RunRecord) -> TokenPanel:
    """Audit the last recorded step of a run. Records that are missing or damaged become a note."""
    if not (run.folder / "audit").is_dir():
        return TokenPanel((), True, (), [ENABLE])
    from tepo_megatron.report.audit.comparison import audit_step  # imports torch, which a run without audits does not need
    from tepo_megatron.report.audit.reading import steps
    from tepo_megatron.report.audit.tables import step_lines

    if not (recorded := steps(run.folder)):
        return TokenPanel((), True, (), [ENABLE])
    try:
        audited = audit_step(run.folder, recorded[-1])
    except DataError as e:
        return TokenPanel((), False, (), [str(e)])
    notes: list[str] = []
    tokenizer = find_tokenizer(run, notes)
    weight_B = np.zeros(len(audited.batch))
    for update in audited.updates:
        np.add.at(weight_B, update.record.sequence_N, np.abs(update.terms["loss"]))
    chosen = [int(s) for s in np.argsort(-weight_B, kind="stable") if audited.batch.response_lengths_B[s]][:SAMPLES]
    samples = [_sample(audited, sequence, tokenizer) for sequence in chosen]
    return TokenPanel(list(step_lines(audited)), audited.agrees, samples, notes)


def _sample(audited: "AuditedStep", sequence: int, tokenizer: "PreTrainedTokenizerBase | None") -> TokenSample:
    from tepo_megatron.report.audit.tables import TERMS, group_lines, terms_of, value_of

    batch, names = audited.batch, list(TERMS)
    here = batch.sequence_L == sequence
    ids, mask = batch.token_ids_L[here].tolist(), batch.response_mask_L[here].tolist()
    prompt, _ = of_tokens(ids, mask, tokenizer)
    chosen = [token for token, of_policy in zip(ids, mask, strict=True) if of_policy]
    versions = batch.versions_L[here][batch.response_mask_L[here]].tolist()
    places: list[dict[str, Any]] = []
    losses: list[float] = []
    for position, token in enumerate(chosen[:TOKENS]):
        updates, loss = [], 0.0
        for update in audited.updates:
            if (index := update.record.find(sequence, position)) is not None:
                loss += float(update.terms["loss"][index])
                rows = [
                    [names.index(name), value_of(name, used), "" if again is None else value_of(name, again)]
                    for name, used, again in terms_of(update, index)
                ]
                updates.append([update.record.number, rows])
        place = f"--token {sequence}:{position}, id {token}, sampled by weights of version {versions[position]}"
        places.append({"place": place, "updates": updates})
        losses.append(loss)
    largest = max(map(abs, losses), default=0.0)
    cells = [
        TokenCell([p for side in of_tokens([token], [True], tokenizer) for p in side], _shade(loss, largest))
        for token, loss in zip(chosen, losses, strict=False)
    ]
    facts = [f"reward {batch.rewards_B[sequence]:.4g}", f"{len(chosen)} tokens", *group_lines(batch, sequence)]
    title = f"sequence {sequence}, prompt {batch.prompt_ids_B[sequence]}"
    numbers = {"names": list(TERMS.values()), "tokens": places}
    right = bool(batch.scores_B[sequence] > 0.5)
    return TokenSample(title, facts, right, shortened(prompt), cells, len(chosen) - len(cells), numbers)


def _shade(loss: float, largest: float) -> str:
    """Return the CSS class of a token with this part of the loss, if the largest one in its response has that."""
    if not loss or not largest:
        return ""
    return f"{'up' if loss < 0 else 'down'}{max(1, round(LEVELS * abs(loss) / largest))}"
