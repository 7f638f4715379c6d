"""What is trained and evaluated on."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from tepo_megatron.config.fields import Positive, PositiveFloat, config

# what `data.train` and `data.eval` may end with: rows from a place on and up to one, counted or in percent
SLICE = re.compile(r"(?P<source>.*)\[(?P<start>\d+%?)?:(?P<stop>\d+%?)?\]", re.DOTALL)


def _check_source(key: str, source: str) -> None:
    """Raise ValueError for a slice that is none."""
    match = SLICE.fullmatch(source)
    if not source.strip() or (match is not None and not match["source"].strip()):
        raise ValueError(f"{key}={source!r} names no file and no dataset")
    if match is None and re.search(r"\[[^/]*:[^/]*\]?$", source):
        raise ValueError(f"{key}={source!r} does not end with a slice like [:1000], [500:] or [10%:20%]")
    if match is not None and any(bound.endswith("%") and int(bound[:-1]) > 100 for bound in match.groups("") if bound):
        raise ValueError(f"{key}={source!r}: a set has no more than 100% of its rows")


@config
class DataSet:
    """One of the sets that are mixed. path: as `data.train`; prompt_key, answer_key: of this set, None as in `data`.

    weight: its share of the prompts, beside those of the other sets, whatever its size; when it is through it starts again.
    """

    path: str
    weight: PositiveFloat = 1.0
    prompt_key: str | None = None
    answer_key: str | None = None

    def __post_init__(self) -> None:
        _check_source("path", self.path)


# the tags keep errors about one of the two apart from errors about the other; `config/io.py` leaves them out of what it tells
_Train = Annotated[
    Annotated[str, Tag("<path>")] | Annotated[list[DataSet], Tag("<sets>")],
    Discriminator(lambda value: "<sets>" if isinstance(value, list) else "<path>"),
]


@config
class DataConfig:
    """train, eval: a file (JSON lines or parquet; `*` stands for several), or a dataset of Hugging Face:
    ORG/NAME[:CONFIG][:SPLIT]. Either may end with a slice of its different prompts: [:1000], [10%:]. train may also be a list
    of sets that are mixed.

    prompt_key: a string, or a list of chat messages (then the chat template applies); a dot leads into an object. None, here or
    for answer_key: found out from the columns (`data/schemas.py`). answer_key: the gold answer, for the grader.
    deduplicate: a prompt is taken once, and refused where it has different answers. skip_bad_rows: what cannot be used is
    counted instead of refused. check_answers: what becomes of rows whose answer the grader cannot read.
    as_chat: strings, too, are messages to the chat template. system_prompt: of chats without one. instruction: ends the last
    message, or the string, as a paragraph of its own. template_kwargs: for the chat template ({enable_thinking: false}).
    """

    train: _Train
    eval: str | None = None
    prompt_key: str | None = None
    answer_key: str | None = None
    max_prompt_tokens: Positive = 2048  # longer prompts are dropped and counted
    shuffle: bool = True  # anew in each epoch
    deduplicate: bool = True
    skip_bad_rows: bool = False
    check_answers: Literal["tell", "drop", "error", "off"] = "tell"
    as_chat: bool = False
    system_prompt: str | None = None
    instruction: str | None = None
    template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("train=[] names no set; give it a file, or at least one set with its path")
        for key, source in (("train", self.train), ("eval", self.eval)):
            if isinstance(source, str):
                _check_source(key, source)
        own = sorted({"tokenize", "add_generation_prompt", "return_dict", "conversation"} & self.template_kwargs.keys())
        if own:
            raise ValueError(f"template_kwargs.{own[0]} is not the template's to know; remove it")

    @property
    def sets(self) -> list[DataSet]:
        """What is trained on: one set, or those that are mixed, with their keys."""
        if isinstance(self.train, str):
            return [DataSet(path=self.train, prompt_key=self.prompt_key, answer_key=self.answer_key)]
        return [
            replace(s, prompt_key=s.prompt_key or self.prompt_key, answer_key=s.answer_key or self.answer_key)
            for s in self.train
        ]

    @property
    def name(self) -> str:
        """What errors call that which is trained on."""
        return " and ".join(s.path for s in self.sets)

    @property
    def paths(self) -> list[tuple[str, str]]:
        """(key, path) of all that is read."""
        named = [("data.train", s.path) for s in self.sets]
        return named if self.eval is None else [*named, ("data.eval", self.eval)]
