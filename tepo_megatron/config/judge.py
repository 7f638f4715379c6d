"""Term `judge` of section `reward`: a language model that reads prompt and response, and writes a verdict."""

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
