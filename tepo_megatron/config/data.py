"""Section `data`: prompts and gold answers."""

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from tepo_megatron.config.fields import Positive, PositiveFloat, config
from tepo_megatron.config.yaml_text import means_more

# the slice at the end of `data.train` or `data.eval`: first and last row, counted or in percent
SLICE = re.compile(r"(?P<source>.*)\[(?P<start>\d+%?)?:(?P<stop>\d+%?)?\]", re.DOTALL)


def check_source(key: str, source: str) -> None:
    """Raise ValueError if a source names nothing, or ends with a malformed slice."""
    match = SLICE.fullmatch(source)
    if not source.strip() or (match is not None and not match["source"].strip()):
        raise ValueError(f"{key}={source!r} names no file and no dataset")
    if match is None and re.search(r"\[[^/]*:[^/]*\]?$", source):
        raise ValueError(f"{key}={source!r} does not end with a slice like [:1000], [500:] or [10%:20%]")
    if match is not None and any(bound.endswith("%") and int(bound[:-1]) > 100 for bound in match.groups("") if bound):
        raise ValueError(f"{key}={source!r}: a set has no more than 100% of its rows")


@config
class DataSet:
    """One of the sets that are mixed."""

    # File or dataset, as in data.train.
    path: str
    # Share of the prompts that come from this set, relative to the weights of the other sets and independent of the set's
    # size. A set that is used up starts again.
    weight: PositiveFloat = 1.0
    # Key of the prompt in the rows of this set. null: data.prompt_key.
    prompt_key: str | None = None
    # Key of the gold answer in the rows of this set. null: data.answer_key.
    answer_key: str | None = None

    def __post_init__(self) -> None:
        check_source("path", self.path)


# the tags keep errors about one of the two types apart from errors about the other; `config/io.py` leaves them out of messages
_Train = Annotated[
    Annotated[str, Tag("<path>")] | Annotated[list[DataSet], Tag("<sets>")],
    Discriminator(lambda value: "<sets>" if isinstance(value, list) else "<path>"),
]


@config
class DataConfig:
    """Prompts for training and evaluation, and their gold answers."""

    # Prompts to train on: a file (JSON lines or parquet; `*` matches several files), a Hugging Face dataset
    # ORG/NAME[:CONFIG][:SPLIT], or reasoning_gym:NAME[?PARAMETER=VALUE&...]. Each may end with a slice of its distinct prompts,
    # such as [:1000] or [10%:]. A list of sections mixes several sets.
    train: _Train
    # Prompts to evaluate on: one file or dataset, with a slice, as in data.train. null: none.
    eval: str | None = None
    # Key of the prompt in a row; a dot leads into an object. The prompt is a string, or a list of chat messages, to which the
    # chat template is applied. null: the key is detected from the columns (`data/schemas.py`).
    prompt_key: str | None = None
    # Key of the gold answer in a row, which the grader compares with. null: the key is detected from the columns.
    answer_key: str | None = None
    # Maximum number of tokens of a prompt. Longer prompts are dropped and counted.
    max_prompt_tokens: Positive = 2048
    # Shuffle the prompts, in another order in each pass over the data.
    shuffle: bool = True
    # Drop and count rows that cannot be used, and prompts with different answers, instead of refusing the data.
    skip_bad_rows: bool = False
    # Treatment of rows whose gold answer the grader cannot read. tell: report them and keep them. drop: leave them out. error:
    # refuse the data. off: do not try the answers.
    check_answers: Literal["tell", "drop", "error", "off"] = "tell"
    # Apply the chat template to prompts that are strings, too: each becomes a message of the user.
    as_chat: bool = False
    # System message for chats without one. null: none is added.
    system_prompt: str | None = None
    # Paragraph that is appended to the last message of a chat, or to a prompt that is a string. null: none.
    instruction: str | None = None
    # Additional arguments of the chat template, such as {enable_thinking: false}.
    template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("train=[] names no set; give it a file, or at least one set with its path")
        for key, source in (("train", self.train), ("eval", self.eval)):
            if isinstance(source, str):
                check_source(key, source)
        own = sorted({"tokenize", "add_generation_prompt", "return_dict", "conversation"} & self.template_kwargs.keys())
        if own:
            raise ValueError(f"template_kwargs.{own[0]} is set by the package; remove it")
        for key, value in self.template_kwargs.items():
            if isinstance(value, str) and means_more(value):
                raise ValueError(f"template_kwargs.{key}={value} is text; write true or false, or the number as 10 or 0.5")

    @property
    def sets(self) -> list[DataSet]:
        """Return the training sets (one, or those that are mixed), each with its own keys."""
        if isinstance(self.train, str):
            return [DataSet(path=self.train, prompt_key=self.prompt_key, answer_key=self.answer_key)]
        return [
            replace(s, prompt_key=s.prompt_key or self.prompt_key, answer_key=s.answer_key or self.answer_key)
            for s in self.train
        ]

    @property
    def held_out(self) -> list[DataSet]:
        """Return the set of `eval`, if there is one."""
        return [] if self.eval is None else [DataSet(path=self.eval, prompt_key=self.prompt_key, answer_key=self.answer_key)]

    @property
    def name(self) -> str:
        """Return the name of the training data in errors."""
        return " and ".join(s.path for s in self.sets)

    @property
    def paths(self) -> list[tuple[str, str]]:
        """Return (key, path) of all sources."""
        named = [("data.train", s.path) for s in self.sets]
        return named if self.eval is None else [*named, ("data.eval", self.eval)]
