"""Section `reward`: grading of the responses. A term `judge` is a language model that reads prompt and response."""

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from tepo_megatron.config.fields import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Weight, config

FIELDS = ("prompt", "response", "answer")
FIELD = re.compile(r"\{(prompt|response|answer)\}")  # in a template; all other braces are text


@config
class JudgeTermConfig:
    """The verdict of a language model behind an OpenAI-compatible server (docs/judges.md)."""

    # Kind of the term.
    type: Literal["judge"]
    # Name by which the server knows the judge.
    model: str
    # Address http(s)://HOST[:PORT]/v1 of the OpenAI-compatible server.
    url: str
    # Message of the user to the judge. {prompt}, {response} and {answer} stand for these texts; all other braces are text.
    question: str
    # System message before it, with the same fields. null: none.
    system: str | None = None
    # Python regular expression with one group. The group of its last match in what the judge writes is the verdict.
    pattern: str = r"(?i)verdict:\s*(-?[0-9.]+)"
    # Value of the term for each verdict, without regard to case. Empty: the verdict is a number, and the term is
    # (number - lowest) / (highest - lowest). Any other verdict counts as unreadable.
    labels: dict[str, Weight] = Field(default_factory=dict)
    # Smallest number that is a verdict. Smaller ones are unreadable.
    lowest: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    # Largest number that is a verdict. Larger ones are unreadable.
    highest: Annotated[float, Field(allow_inf_nan=False)] = 10.0
    # Number of verdicts on each response, of different seeds. The term is their mean.
    verdicts: Positive = 1
    # Number of further requests for unreadable verdicts, with other seeds, and at temperature 0.7 at least. A response without
    # a readable verdict after them counts as 0, and its status is `unjudged`.
    retries: NonNegative = 2
    # Largest share of unjudged responses among the last 256. With more, from the 32nd on, the run ends.
    max_unjudged_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.2
    # Sampling temperature of the judge. 0: its most likely token.
    temperature: NonNegativeFloat = 0.0
    # Seed of the judge's samples. Those on a response also depend on the texts, and on nothing else.
    seed: NonNegative = 0
    # Maximum number of tokens that the judge writes.
    max_tokens: Positive = 512
    # Environment variable with the key of that server, which is sent as a bearer token. null: no key is sent.
    key_variable: str | None = None
    # Maximum number of requests at a time.
    concurrency: Positive = 64
    # Seconds after which a request is given up and sent again.
    # Limit since a request to the judge: as long as the run's own servers have; then it is sent again
    request_seconds: PositiveFloat = 1800.0
    # Factor of the term in the reward.
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        self._check_verdicts()
        self._check_url()

    @property
    def messages(self) -> list[tuple[str, str]]:
        """Return (role, template) of each message to the judge."""
        system = [] if self.system is None else [("system", self.system)]
        return [*system, ("user", self.question)]

    def _check_verdicts(self) -> None:
        if not any("{response}" in template for _, template in self.messages):
            raise ValueError("question: it shows the judge no response; write {response} where the response should be")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as e:
            raise ValueError(f"pattern={self.pattern!r} is no regular expression ({e})") from None
        if groups != 1:
            raise ValueError(
                f"pattern={self.pattern!r} has {groups} groups, and the one group is the verdict; write (?:...) for others"
            )
        if self.lowest >= self.highest:
            raise ValueError(f"lowest={self.lowest:g} is not below highest={self.highest:g}; lower it")
        if len({label.casefold() for label in self.labels}) < len(self.labels):
            raise ValueError(f"labels={list(self.labels)} differ only in case, which does not count; remove one")
        if self.verdicts > 1 and self.temperature == 0:
            raise ValueError(
                f"verdicts={self.verdicts} with temperature=0 asks for the same verdict several times; set verdicts to 1, or "
                "temperature above 0"
            )

    def _check_url(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(f"url={self.url!r} is not http(s)://HOST[:PORT]/PATH without a password; name one")


@config
class AnswerTermConfig:
    """1 for a right final answer, 0 for any other.

    The final answer is the last \\boxed{}. For answer_line a line `Answer: ...` after it takes precedence.
    """

    # Kind of the term.
    type: Literal["math", "answer_line"]
    # Factor of the term in the reward.
    weight: Weight = 1.0


@config
class FormatTermConfig:
    """1 if the whole response matches a regular expression, else 0."""

    # Kind of the term.
    type: Literal["format"]
    # Python regular expression that must match the whole response. `.` also matches a line break.
    pattern: str
    # Factor of the term in the reward.
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as e:
            raise ValueError(f"pattern={self.pattern!r} is no regular expression ({e})") from None


@config
class LengthTermConfig:
    """1 for responses of min_tokens to max_tokens; |y| / min_tokens for shorter, max_tokens / |y| for longer ones."""

    # Kind of the term.
    type: Literal["length"]
    # Number of tokens of the longest response that scores 1.
    max_tokens: Positive
    # Number of tokens of the shortest response that scores 1.
    min_tokens: NonNegative = 0
    # Factor of the term in the reward.
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower it")


@config
class CustomTermConfig:
    """The value of a Python function, which runs in worker processes."""

    # Kind of the term.
    type: Literal["custom"]
    # path/to/file.py:name of a function (prompt, response, answer[, row]) -> float. The first three are text, `row` is a dict
    # of the other columns.
    function: str
    # Factor of the term in the reward.
    weight: Weight = 1.0


@config
class ReasoningGymTermConfig:
    """The verifier of the reasoning-gym dataset that data.train and data.eval name (docs/rewards.md)."""

    # Kind of the term.
    type: Literal["reasoning_gym"]
    # Part of the response that the verifier reads. tag: between the last <answer> and </answer>. number: the last number.
    # whole: all of it.
    answer: Literal["tag", "number", "whole"] = "tag"
    # all: 1 if the verifier gives 1, else 0. share: what the verifier gives, 0 to 1.
    credit: Literal["all", "share"] = "all"
    # Factor of the term in the reward.
    weight: Weight = 1.0


@config
class CodeTermConfig:
    """1 if the program in the last code block of a response passes the unit tests that are its gold answer, else 0.

    Programs run in a sandbox without network or files of this machine, which takes bubblewrap (docs/code_rewards.md).
    """

    # Kind of the term.
    type: Literal["code"]
    # all: 1 if all tests are passed, else 0. share: the share of the tests that are passed.
    credit: Literal["all", "share"] = "all"
    # Seconds of processor time for each process of a run: one test of stdin and stdout, or all tests that call functions.
    # Limit since a program began, in processor time: it is work, which another machine does not lengthen; then `timeout`
    run_seconds: PositiveFloat = 4.0
    # Seconds of wall time for all runs of one response. Tests that have not begun by then are not passed.
    # Limit since the runs of a response began: some hundred tests of milliseconds; then the other tests are not passed
    response_seconds: PositiveFloat = 60.0
    # MiB of memory of a program.
    memory_mib: Annotated[int, Field(ge=64, strict=True)] = 512
    # Number of processes and threads of a program at once.
    processes: Positive = 16
    # Factor of the term in the reward.
    weight: Weight = 1.0

    @property
    def wall_seconds(self) -> float:
        """Return the seconds of wall time for each run: several times its processor time, because other work delays it."""
        return 4 * self.run_seconds


@config
class HttpTermConfig:
    """Rewards from a server, with one request per batch (`rewards/remote.py`). If the server does not answer, the run fails."""

    # Kind of the term.
    type: Literal["http"]
    # http(s)://HOST[:PORT]/PATH of the reward server.
    url: str
    # Seconds until the last byte of the server's answer must have arrived.
    # Limit since a request to a reward server: a 14B model reads 16 responses of 32k tokens in a minute; then the run ends
    timeout_seconds: PositiveFloat = 600.0
    # Maximum number of requests that the server has at once. A request holds the responses of one group.
    concurrency: Positive = 16
    # Environment variable with the key that is sent as a bearer token. null: no key is sent.
    key_variable: str | None = None
    # Factor of the term in the reward.
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError(f"url={self.url!r} is not http(s)://HOST[:PORT]/PATH without a password; name one")


AnyTermConfig = (
    AnswerTermConfig
    | FormatTermConfig
    | LengthTermConfig
    | CustomTermConfig
    | CodeTermConfig
    | ReasoningGymTermConfig
    | HttpTermConfig
    | JudgeTermConfig
)
RewardTerm = Annotated[AnyTermConfig, Field(discriminator="type")]


def _default_terms() -> list[AnyTermConfig]:
    return [AnswerTermConfig(type="math")]


@config
class RewardConfig:
    """Grading of the responses in worker processes, and shaping of the reward."""

    # Terms of the reward, summed up by their weights. The first term is the verdict: it decides which groups are filtered and
    # counts as accuracy, without its weight. The other terms change the reward only.
    terms: list[RewardTerm] = Field(default_factory=_default_terms)
    # Number of worker processes for each term that needs some.
    workers: Positive = 2
    # Seconds of wall time after which grading of a response is aborted and the worker is replaced. A worker itself gives up
    # after half as many seconds of processor time. Either way the term is 0 and the status of the sample is `timeout`.
    # Limit since a worker took a response, which is milliseconds of work: an answer that the grader ends by itself is tried
    # twice; then `timeout`
    timeout_seconds: PositiveFloat = 4.0
    # Number of tokens before rollout.max_response_tokens in which the penalty on long responses grows linearly from 0 to 0.5.
    # 0: no penalty. null: a fifth of rollout.max_response_tokens under objective.overlong_shaping, else 0.
    overlong_buffer_tokens: NonNegative | None = None

    def __post_init__(self) -> None:
        if not self.terms or self.terms[0].type in ("format", "length"):
            raise ValueError(
                "terms: the first entry is the verdict, by which groups are filtered and accuracies counted; let it be math, "
                "answer_line, code, custom, reasoning_gym, http or judge"
            )

    @property
    def processor_seconds(self) -> float:
        """Return the seconds of processor time after which a worker gives a response up."""
        return self.timeout_seconds / 2
