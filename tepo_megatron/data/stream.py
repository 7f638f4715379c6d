"""Load all prompts that a run reads, and stream those of one training set, or of several by weight: endless and resumable."""

import hashlib
import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tepo_megatron.base.errors import DataError
from tepo_megatron.base.types import Prompt
from tepo_megatron.config import DataConfig, RewardConfig
from tepo_megatron.data.prompts import load_prompts
from tepo_megatron.rewards.gold_check import unreadable_golds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Limit since the first answers of the grader, which starts slowly: the result is only reported; then the rest is untried
GOLDS_SECONDS = 30.0


@dataclass(frozen=True)
class Data:
    """The prompts of a run.

    Attributes:
        train: (prompts, sampling weight) of each training set.
        eval: Held-out problems; empty without `data.eval`.
        log_lines: Lines for the log about what was read and dropped.
    """

    train: list[tuple[list[Prompt], float]]
    eval: list[Prompt]
    log_lines: list[str]

    @property
    def count(self) -> int:
        """Number of prompts to train on, over all sets."""
        return sum(len(prompts) for prompts, _ in self.train)


def load_data(cfg: DataConfig, reward: RewardConfig, tokenizer: "PreTrainedTokenizerBase") -> Data:
    """Read all sets that `cfg` names. A prompt that several training sets have is kept in the first of them only.

    Prompts of `data.eval` that are also in `data.train` are kept in both and reported in a warning line.

    Raises:
        DataError: A set cannot be read or used.
        ConfigError: Settings do not fit the prompts or the chat template.
    """

    def try_golds(golds: Sequence[str]) -> tuple[dict[str, str], int]:
        """Try gold answers on the grader, without a time limit where the result decides what is kept."""
        return unreadable_golds(golds, reward, GOLDS_SECONDS if cfg.check_answers == "tell" else math.inf)

    log_lines: list[str] = []
    train: list[tuple[list[Prompt], float]] = []
    seen: dict[bytes, tuple[str, str]] = {}
    for number, source in enumerate(cfg.sets):
        loaded = load_prompts(source, cfg, tokenizer, try_golds, number=number, earlier=seen)
        seen |= loaded.seen
        train.append((loaded.prompts, source.weight))
        log_lines += [str(loaded.report), loaded.report.reading(), *loaded.report.details()]
    if not cfg.held_out:
        return Data(train, [], log_lines)
    held_out = load_prompts(cfg.held_out[0], cfg, tokenizer, try_golds)
    log_lines += [str(held_out.report), held_out.report.reading(), *held_out.report.details()]
    if both := len(held_out.seen.keys() & seen.keys()):
        log_lines.append(f"warning: {both} of the {len(held_out.seen)} prompts of data.eval are in data.train too")
    return Data(train, held_out.prompts, log_lines)


class _SetCursor:
    """Goes through one set epoch after epoch. With `shuffle`, the order is that of a hash of (seed, epoch, prompt id)."""

    def __init__(self, prompts: Sequence[Prompt], weight: float, seed: int, shuffle: bool) -> None:
        self.prompts, self.weight = list(prompts), weight
        self._seed, self._shuffle = seed, shuffle
        self.drawn = 0  # prompts drawn since the start of the run
        self.enter(epoch=0, position=0)

    def enter(self, epoch: int, position: int) -> None:
        """Start an epoch."""
        self.epoch, self.position = epoch, position
        order = list(range(len(self.prompts)))
        if self._shuffle:
            order.sort(key=lambda i: _digest(f"{self._seed}/{epoch}/{self.prompts[i].id}"))
        self._order = order

    def next(self, held: Collection[int]) -> Prompt:
        """Return the next prompt whose id is not in `held`. There must be one."""
        while True:
            if self.position == len(self._order):
                self.enter(self.epoch + 1, position=0)
            prompt = self.prompts[self._order[self.position]]
            self.position += 1
            if prompt.id not in held:
                self.drawn += 1
                return prompt


class PromptStream:
    """Streams prompts epoch after epoch. With `shuffle`, each epoch has its own order.

    With several sets (`PromptStream.mixed`), each set has its own epochs, and the next prompt comes from the set that is
    furthest behind its share. After n prompts each set has given its share of n to within one, unless the rule that a batch
    holds no prompt twice prevents it. The order is the same on every machine and Python version; only epochs and positions have
    to be stored.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        """Stream one set.

        Raises:
            DataError: There are no prompts, or two have the same id.
        """
        self._set_up([(prompts, 1.0)], seed, shuffle)

    @classmethod
    def mixed(cls, sets: Sequence[tuple[Sequence[Prompt], float]], seed: int, shuffle: bool) -> "PromptStream":
        """Return a stream of several sets.

        Raises:
            DataError: A set is empty, or two prompts have the same id.
        """
        stream = cls.__new__(cls)
        stream._set_up(sets, seed, shuffle)
        return stream

    def _set_up(self, sets: Sequence[tuple[Sequence[Prompt], float]], seed: int, shuffle: bool) -> None:
        if not sets or not all(prompts for prompts, _ in sets):
            raise DataError("data.train: no prompts to stream")
        self._prompts = [prompt for prompts, _ in sets for prompt in prompts]
        self._set_of = {prompt.id: at for at, (prompts, _) in enumerate(sets) for prompt in prompts}  # by prompt id
        if len(self._set_of) < len(self._prompts):
            raise DataError("data.train: two prompts have the same id; ids are unique over all sets")
        self._seed, self._shuffle = seed, shuffle
        self._walks = [_SetCursor(prompts, weight, seed, shuffle) for prompts, weight in sets]
        self._fingerprint = fingerprint(self._prompts)
        self._returned: deque[Prompt] = deque()

    def take(self, n: int, excluding: Collection[int] = ()) -> list[Prompt]:
        """Return the next n prompts, all different; prompts that were given back come first.

        A batch that runs over the end of an epoch skips the prompts it already has: responses are grouped by prompt, so a
        prompt that came twice would form one group. The time does not depend on the size of the sets.

        Raises:
            DataError: There are fewer than n such prompts.
        """
        held = set(excluding)
        held_by_set = Counter(self._set_of.get(i) for i in held)
        free = [len(walk.prompts) - held_by_set[at] for at, walk in enumerate(self._walks)]
        if n > sum(free):
            raise DataError(
                f"data.train has {len(self._prompts)} prompts, {len(self._prompts) - sum(free)} of them already in this step; "
                f"{n} more different ones are not there: lower rollout.prompts_per_step (or rollout.max_generation_rounds)"
            )
        taken: list[Prompt] = []
        skipped: list[Prompt] = []
        while self._returned and len(taken) < n:
            prompt = self._returned.popleft()
            if prompt.id in held:
                skipped.append(prompt)
                continue
            held.add(prompt.id)
            taken.append(prompt)
            free[self._set_of[prompt.id] if len(free) > 1 else 0] -= 1
        self.give_back(skipped)
        while len(taken) < n:
            at = self._behind([i for i, count in enumerate(free) if count])
            prompt = self._walks[at].next(held)
            free[at] -= 1
            held.add(prompt.id)
            taken.append(prompt)
        return taken

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Return prompts that were taken and not used; `take` hands them out first, in this order."""
        self._returned.extendleft(reversed(prompts))

    def state_dict(self, returned: Sequence[Prompt] = ()) -> dict[str, Any]:
        """Return the state that a checkpoint needs to continue exactly here, as plain JSON values."""
        first, *others = self._walks
        state = {
            "epoch": first.epoch,
            "position": first.position,
            "returned": [prompt.id for prompt in (*returned, *self._returned)],
            "seed": self._seed,
            "shuffle": self._shuffle,
            "count": len(self._prompts),
            "fingerprint": self._fingerprint,
        }
        if others:  # the state of a single set keeps its original format
            state["weights"] = [walk.weight for walk in self._walks]
            state["sets"] = [[walk.epoch, walk.position, walk.drawn] for walk in self._walks]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved. Raise DataError if it belongs to other prompts, weights, or another order."""
        here = self.state_dict()
        for key, fix in (
            ("count", "resume with the same data.train and data.max_prompt_tokens"),
            ("fingerprint", "resume with the same data.train, keys and tokenizer"),
            ("weights", "resume with the same sets and weights in data.train"),
            ("seed", "resume with the same seed"),
            ("shuffle", "resume with the same data.shuffle"),
        ):
            if state.get(key) != here.get(key):
                raise DataError(
                    f"the checkpoint's place in the dataset is not one of this dataset: {key} was {state.get(key)} and is "
                    f"{here.get(key)}; {fix}, or start a new run"
                )
        places = state.get("sets", [[state["epoch"], state["position"], 0]])
        for walk, (epoch, position, drawn) in zip(self._walks, places, strict=True):
            walk.enter(epoch, position)
            walk.drawn = drawn
        by_id = {prompt.id: prompt for prompt in self._prompts}
        self._returned = deque(by_id[i] for i in state.get("returned", []))  # old checkpoints lack the key

    def _behind(self, able: Sequence[int]) -> int:
        """Return the set of `able` that is furthest behind its share of all prompts drawn; the first one on a tie."""
        if len(able) == 1:
            return able[0]
        drawn = 1 + sum(walk.drawn for walk in self._walks)
        weight = sum(walk.weight for walk in self._walks)
        return max(able, key=lambda i: (drawn * self._walks[i].weight / weight - self._walks[i].drawn, -i))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a digest of ids, tokens and answers, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(repr((prompt.id, prompt.token_ids, prompt.answer)).encode(errors="surrogatepass"))
    return digest.hexdigest()
