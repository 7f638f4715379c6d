"""An endless, resumable stream of prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

from tepo_megatron.errors import DataError
from tepo_megatron.types import Prompt


class PromptStream:
    """Goes through `prompts` epoch after epoch, each in an order of its own if `shuffle`.

    The order is that of a hash of (seed, epoch, prompt id): the same on every machine and Python version, with nothing
    to store but epoch and position.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        if not prompts:
            raise DataError("data.train: no prompts to stream")
        self._prompts = list(prompts)
        self._seed, self._shuffle = seed, shuffle
        self._fingerprint = _fingerprint(prompts)
        self._returned: list[Prompt] = []
        self._enter(epoch=0, position=0)

    def take(self, n: int, excluding: Collection[int] = ()) -> list[Prompt]:
        """The next n prompts, all different and none with an id in `excluding` (those that the step already holds).

        A batch that runs over the end of an epoch passes over the prompts it already has: responses are grouped by
        prompt, so one prompt twice in a batch would be one group. Raises DataError if there are not n such prompts.
        """
        held = set(excluding)
        available = sum(prompt.id not in held for prompt in self._prompts)
        if n > available:
            raise DataError(
                f"data.train has {len(self._prompts)} prompts, {len(self._prompts) - available} of them already in this "
                f"step; {n} more different ones are not there: lower rollout.prompts_per_step (or rollout.max_refills)"
            )
        taken: list[Prompt] = []
        for prompt in [p for p in self._returned if p.id not in held][:n]:
            self._returned.remove(prompt)
            held.add(prompt.id)
            taken.append(prompt)
        while len(taken) < n:
            if self._position == len(self._order):
                self._enter(epoch=self._epoch + 1, position=0)
            prompt = self._prompts[self._order[self._position]]
            self._position += 1
            if prompt.id not in held:
                held.add(prompt.id)
                taken.append(prompt)
        return taken

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """These were taken and not used: the next to be taken."""
        self._returned = [*prompts, *self._returned]

    def state_dict(self, returned: Sequence[Prompt] = ()) -> dict[str, Any]:
        """All that a checkpoint needs to go on exactly here; plain JSON values. returned: as if these had been given back."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "returned": [prompt.id for prompt in (*returned, *self._returned)],
            "seed": self._seed,
            "shuffle": self._shuffle,
            "count": len(self._prompts),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises DataError if it belongs to other prompts or another order."""
        here = self.state_dict()
        for key, mend in (
            ("count", "resume with the same data.train and data.max_prompt_tokens"),
            ("fingerprint", "resume with the same data.train, keys and tokenizer"),
            ("seed", "resume with the same seed"),
            ("shuffle", "resume with the same data.shuffle"),
        ):
            if state[key] != here[key]:
                raise DataError(
                    f"the checkpoint's place in the dataset is not one of this dataset: {key} was {state[key]} and is "
                    f"{here[key]}; {mend}, or start a new run"
                )
        self._enter(epoch=state["epoch"], position=state["position"])
        by_id = {prompt.id: prompt for prompt in self._prompts}
        self._returned = [by_id[i] for i in state.get("returned", [])]  # earlier checkpoints knew of none

    def _enter(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        order = list(range(len(self._prompts)))
        if self._shuffle:
            order.sort(key=lambda i: _digest(f"{self._seed}/{epoch}/{self._prompts[i].id}"))
        self._order = order


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Of ids, tokens and answers, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(repr((prompt.id, prompt.token_ids, prompt.answer)).encode(errors="surrogatepass"))
    return digest.hexdigest()
