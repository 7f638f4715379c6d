"""Judges of a run: fleets of inference servers with frozen weights, next to the fleet that samples, or servers of others.

A judge's fleet is the same code as that of the rollouts: it starts, watches and restarts its servers, which require a key in
every request. It never gets weights and never sleeps, so it has GPUs of its own.
"""

import asyncio
import contextlib
import itertools
import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from tepo_megatron.config import JudgeTermConfig, RolloutConfig
from tepo_megatron.config.judge import FIELD
from tepo_megatron.data import load_tokenizer, stop_tokens, text_functions
from tepo_megatron.errors import ConfigError, RewardError, RolloutError, TepoError
from tepo_megatron.inference.engine_api import LaunchSpec, Platform, Precision
from tepo_megatron.inference.engines import build_engine
from tepo_megatron.inference.linear_attention import check_linear_attention, layers_of
from tepo_megatron.inference.servers.process import LOOPBACK
from tepo_megatron.rewards.judge import ChatServer, Judge, JudgeReply, QuestionTooLong
from tepo_megatron.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class QuotedChat:
    """Messages with fields, as tokens.

    The chat template renders the messages once, with a mark in place of each field, so that a template never sees the texts.
    What is between the marks may hold special tokens. A text is tokenized by itself: where it spells a special or an added
    token, that spelling is cut in two, and each part is ordinary text. Raises ConfigError if the chat template refuses the
    messages, or loses a field.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", messages: Sequence[tuple[str, str]]) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()  # a fast tokenizer is for one thread at a time
        added = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
        spelled = {token for token in added if len(token) > 1 and not token.isspace()}  # a single one has no parts
        # unknown characters have the token that says so, and it controls nothing
        self._added_ids = {tokenizer.convert_tokens_to_ids(token) for token in spelled} - {tokenizer.unk_token_id}
        self._spelled = re.compile("|".join(map(re.escape, sorted(spelled, key=len, reverse=True))) or r"(?!)")
        # ids of what is between two fields, and the name of the field that follows; None after the last
        self._parts: list[tuple[list[int], str | None]] = []
        mark = f"field{secrets.token_hex(8)}x"
        marked = [{"role": role, "content": FIELD.sub(lambda found: f"{mark}{found[1]}x", text)} for role, text in messages]
        pieces = re.split(rf"{mark}(prompt|response|answer)x", self._rendered(marked))
        wanted = sum(len(FIELD.findall(text)) for _, text in messages)
        if len(pieces) != 2 * wanted + 1:
            raise ConfigError(
                f"the chat template of the judge's tokenizer shows {len(pieces) // 2} of the {wanted} fields of the messages; "
                "use another template, or put all fields into question"
            )
        for i in range(0, len(pieces), 2):
            ids = list(tokenizer(pieces[i], add_special_tokens=False).input_ids) if pieces[i] else []
            self._parts.append((ids, pieces[i + 1] if i + 1 < len(pieces) else None))

    def encode(self, fields: Mapping[str, str]) -> list[int]:
        """Return the tokens of the chat with these texts, up to where the model writes."""
        with self._lock:
            texts = {name: self._quoted(text) for name, text in fields.items()}
        return [token for ids, name in self._parts for token in (*ids, *(texts[name] if name is not None else ()))]

    def _quoted(self, text: str) -> list[int]:
        cuts = [0, *(found.start() + 1 for found in self._spelled.finditer(text)), len(text)]
        ids = self._tokenized([text[begin:end] for begin, end in itertools.pairwise(cuts)])
        if self._added_ids.isdisjoint(ids):
            return ids
        # the tokenizer finds them in other spellings, too, such as another case
        return [token for token in self._tokenized(list(text)) if token not in self._added_ids]

    def _tokenized(self, pieces: Sequence[str]) -> list[int]:
        asked = [piece for piece in pieces if piece]
        rows = self._tokenizer(asked, add_special_tokens=False).input_ids if asked else []
        return [token for row in rows for token in row]

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        if self._tokenizer.chat_template is None:
            return "\n\n".join(message["content"] for message in messages)
        try:
            return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except Exception as e:  # a template may raise any exception
            raise ConfigError(f"the judge's chat template refuses the messages ({e}); leave out system") from None


@dataclass(frozen=True)
class JudgePlace:
    """Where the judges of a run are."""

    platform: Platform
    precision: Precision
    first_device: int
    log_folder: Path

    @classmethod
    def next_to(cls, rollout: RolloutConfig, ranks: int, platform: Platform, precision: Precision, log_folder: Path) -> Self:
        """Return the place of the judges of a run."""
        first = rollout.devices_used(int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
        return cls(platform, precision, first, log_folder)


def check_judges(judges: Mapping[int, JudgeTermConfig], platform: Platform) -> None:
    """Raise a TepoError for judges that this run would serve and that cannot work. Nothing is started."""
    for index, entry in judges.items():
        if entry.url is None:
            with _named(index):
                check_linear_attention(_fleet_config(entry), entry.model, platform)
                QuotedChat(load_tokenizer(entry.model), entry.messages)


@contextlib.contextmanager
def open_judges(judges: Mapping[int, JudgeTermConfig], place: JudgePlace) -> Iterator["Judges"]:
    """Yield the judges of a run. Their servers start loading at once."""
    own = {index: entry for index, entry in judges.items() if entry.url is None}
    if own:
        _check_machine(own, place)
    with contextlib.ExitStack() as stack:
        found: dict[int, Judge] = {}
        fleets, device = [], place.first_device
        for index, entry in judges.items():
            if entry.url is not None:
                found[index] = ChatServer(
                    entry.url,
                    entry.model,
                    entry.messages,
                    max_tokens=entry.max_tokens,
                    timeout_seconds=entry.server.request_seconds,
                    concurrency=entry.server.concurrency,
                    key_variable=entry.key_variable,
                )
                continue
            with _named(index):
                fleet = stack.enter_context(JudgeFleet(index, entry, place, device))
                fleet.start()
            found[index] = fleet
            fleets.append(fleet)
            device += entry.gpus
        yield Judges(found, fleets)


class Judges:
    """The judges of a run by the indices of their terms. `fleets` are those that the run serves itself."""

    def __init__(self, by_term: Mapping[int, Judge], fleets: Sequence["JudgeFleet"]) -> None:
        self.by_term, self.fleets = by_term, fleets

    def take_events(self) -> list[str]:
        return [f"judge: {event}" for fleet in self.fleets for event in fleet.take_events()]


class JudgeFleet(contextlib.AbstractContextManager["JudgeFleet"]):
    """Implementation of `judge.Judge` by servers of this run. Leaving the context ends them."""

    def __init__(self, index: int, entry: JudgeTermConfig, place: JudgePlace, first_device: int) -> None:
        tokenizer, path = load_tokenizer(entry.model), Path(entry.model)
        self._index, self._entry = index, entry
        self._chat, self._decode = QuotedChat(tokenizer, entry.messages), text_functions(tokenizer)[1]
        self._stops = stop_tokens(path, tokenizer)
        launch = LaunchSpec(
            model_path=path,
            max_model_len=entry.max_prompt_tokens + entry.max_tokens,
            platform=place.platform,
            precision=entry.server.precision or place.precision,
            seed=entry.seed,
            first_device=first_device,
            host=LOOPBACK,
            **layers_of(path),
        )
        self._fleet = build_engine(_fleet_config(entry), launch, place.log_folder / f"judge-{index}.log")

    def start(self) -> None:
        """Start the servers and return at once; the first question waits for them. Raises RolloutError, ConfigError."""
        self._fleet.start()

    async def ask(self, fields: Mapping[str, str], samples: int, seed: int, temperature: float) -> list[JudgeReply]:
        """Ask for all answers in one request. A server that fails is restarted, and the question is repeated."""
        ids = await asyncio.to_thread(self._chat.encode, fields)
        if len(ids) > self._entry.max_prompt_tokens:
            raise QuestionTooLong(
                f"the question has {len(ids)} tokens, more than max_prompt_tokens={self._entry.max_prompt_tokens}"
            )
        sampling = SamplingParams(samples, temperature, self._entry.max_tokens, self._stops)
        try:
            rollouts = await self._fleet.sample(Prompt(0, tuple(ids), ""), sampling, seed)
        except RolloutError as e:
            raise RewardError(_under_its_key(str(e), self._index)) from None
        return [JudgeReply(self._decode(r.response_ids), len(ids), r.response_length) for r in rollouts]

    def take_events(self) -> list[str]:
        return [_under_its_key(event, self._index) for event in self._fleet.take_events()]

    async def close(self) -> None:
        """Do nothing: the servers end with the context, in the thread that started them."""

    def __exit__(self, *exc_info: object) -> None:
        self._fleet.close()


def _fleet_config(entry: JudgeTermConfig) -> RolloutConfig:
    """Return the settings of a fleet that only samples, with the weights of its model directory."""
    return RolloutConfig(
        only=True, engine=entry.engine, servers=entry.servers, min_servers=entry.min_servers, server=entry.server
    )


def _check_machine(own: Mapping[int, JudgeTermConfig], place: JudgePlace) -> None:
    index, first = next(iter(own.items()))
    if int(os.environ.get("WORLD_SIZE", 1)) != int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1))):
        raise ConfigError(
            f"reward.terms.{index}: the run starts the servers of the judge {first.model} on one machine, and the ranks are on "
            "several; serve it by yourself and set url"
        )
    wanted, there = place.first_device + sum(entry.gpus for entry in own.values()), torch.cuda.device_count()
    if place.platform == "cuda" and there < wanted:
        raise ConfigError(
            f"reward.terms.{index}: ranks, rollout servers and judges take {wanted} GPUs, and this machine has {there}; a "
            "judge has GPUs of its own, also with rollout.colocate; lower servers or server.tp of the judge, or set its url"
        )


@contextlib.contextmanager
def _named(index: int) -> Iterator[None]:
    try:
        yield
    except TepoError as e:
        raise type(e)(_under_its_key(str(e), index)) from None


def _under_its_key(text: str, index: int) -> str:
    """Return a message of the fleet, which names keys of `rollout`, with the keys of the term; they have the same names."""
    key = f"reward.terms.{index}"
    text = text.replace("rollout.", f"{key}.").replace("model.path", f"{key}.model")
    return text if key in text else f"{key}: {text}"
