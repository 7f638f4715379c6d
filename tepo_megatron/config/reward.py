"""How a response is graded."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from tepo_megatron.config.fields import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Weight, config


@config
class AnswerTermConfig:
    """1 for the right final answer, 0 for any other: the last \\boxed{}; for answer_line, or a later line `Answer: ...`."""

    type: Literal["math", "answer_line"]
    weight: Weight = 1.0


@config
class FormatTermConfig:
    """1 where the whole response matches the regular expression `pattern` (`.` is a line break, too), else 0."""

    type: Literal["format"]
    pattern: str
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as e:
            raise ValueError(f"pattern={self.pattern!r} is no regular expression ({e})") from None


@config
class LengthTermConfig:
    """1 for responses of min_tokens to max_tokens; |y| / min_tokens for shorter, max_tokens / |y| for longer ones."""

    type: Literal["length"]
    max_tokens: Positive
    min_tokens: NonNegative = 0
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower it")


@config
class CustomTermConfig:
    """function: path/to/file.py:name of a function (prompt, response, answer) -> float, all texts, run in worker processes."""

    type: Literal["custom"]
    function: str
    weight: Weight = 1.0


@config
class HttpTermConfig:
    """Rewards from a server at `url`, one request for each batch (`rewards/remote.py`); without an answer the run fails."""

    type: Literal["http"]
    url: str
    timeout_seconds: PositiveFloat = 60.0  # seconds of one whole exchange, to the last byte of the answer
    attempts: Positive = 4  # requests for the same batch
    backoff_seconds: NonNegativeFloat = 1.0  # before the second of them, doubled each time
    key_variable: str | None = None  # the environment variable with the key that goes along as a bearer token
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(f"url={self.url!r} is not http(s)://HOST[:PORT]/PATH without a password; name one")


AnyTermConfig = AnswerTermConfig | FormatTermConfig | LengthTermConfig | CustomTermConfig | HttpTermConfig
RewardTerm = Annotated[AnyTermConfig, Field(discriminator="type")]


@config
class RewardConfig:
    """How a response is graded, in worker processes, and how that grade is shaped.

    type: of the one term that grades; terms: several, summed up by their weights, instead. Their first is the verdict, by which
    groups are filtered and accuracies counted, without its weight; the others change the reward only.
    """

    type: Literal["math", "answer_line"] = "math"
    terms: list[RewardTerm] | None = None
    workers: Positive = 2  # processes of each term that needs some
    soft_seconds: Positive = 2  # of processor time, then a worker gives an answer up
    hard_seconds: PositiveFloat = 4.0  # of wall time, then it is killed
    memory_mib: Positive = 1024  # address space of a worker
    max_answer_chars: Positive = 512  # a longer answer is wrong, unread
    # the last tokens before rollout.max_response_tokens, in which a response costs more and more, up to overlong_penalty;
    # 0: never; None: a fifth of rollout.max_response_tokens under objective.overlong_shaping, else 0
    overlong_buffer_tokens: NonNegative | None = None
    overlong_penalty: PositiveFloat = 0.5  # verdicts are 0 and 1; DAPO's 1 stands beside verdicts of -1 and 1

    def __post_init__(self) -> None:
        if self.hard_seconds <= self.soft_seconds:
            raise ValueError(f"hard_seconds={self.hard_seconds} must exceed soft_seconds={self.soft_seconds}")
        if self.terms is None:
            return
        if self.type != "math":
            raise ValueError(f"type={self.type} is not used beside terms; remove it, or write an entry of that type")
        if not self.terms or self.terms[0].type in ("format", "length"):
            raise ValueError(
                "terms: the first entry is the verdict, by which groups are filtered and accuracies counted; let it be math, "
                "answer_line, custom or http"
            )

    @property
    def entries(self) -> list[AnyTermConfig]:
        """`terms`, or the one that `type` names."""
        return self.terms if self.terms is not None else [AnswerTermConfig(type=self.type)]
