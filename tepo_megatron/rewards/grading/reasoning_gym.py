"""Problems and verifiers of reasoning-gym, by name: `reasoning_gym:chain_sum?min_terms=2&max_terms=2&size=700`.

The parameters are those of the dataset's config. `level=2` sets every attribute of its curriculum to that level, counted from
0; other parameters overrule it. An item depends on the name, the parameters and its place alone, so that a grading worker makes
the item again instead of receiving it.
"""

import dataclasses
import difflib
import functools
import json
import re
import sys
import types
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

PREFIX = "reasoning_gym:"
_SIZE = 500  # items, unless `size` says otherwise
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@functools.cache
def dataset(source: str) -> Any:
    """Return the `ProceduralDataset` of a source. Raise ValueError for an unknown name or parameter, or without the package."""
    name, _, query = source.removeprefix(PREFIX).partition("?")
    factory = _factory(source)
    if name not in factory.DATASETS:
        near = difflib.get_close_matches(name, factory.DATASETS, n=3) or sorted(factory.DATASETS)
        raise ValueError(f"{source}: reasoning-gym has no dataset {name!r}; did you mean {', '.join(near)}?")
    _, config_class = factory.DATASETS[name]
    parameters = {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    level = parameters.pop("level", None)
    known = {field.name for field in dataclasses.fields(config_class)}
    if unknown := sorted(parameters.keys() - known):
        raise ValueError(f"{source}: {name} has no parameter {unknown[0]!r}; it has level, {', '.join(sorted(known))}")
    try:
        if level is not None:
            parameters = _at_level(factory.create_curriculum(name), level) | parameters
        return factory.create_dataset(name, **({"size": _SIZE, "seed": 0} | parameters))
    except Exception as e:  # a config's own checks are assertions, of which some compare a text with a number
        raise ValueError(f"{source}: reasoning-gym refuses it ({type(e).__name__}: {e}); correct the parameters") from None


def grader(answer: str, credit: str) -> Callable[..., tuple[str, float, str]]:
    """Return the grader (source, place, response) -> graded or no_answer, with the value of the dataset's verifier.

    Args:
        answer: Which part of the response is the answer: a key of `ANSWERS`.
        credit: "share" for the verifier's score in [0, 1]; "all" for 1 where that is 1, else 0.
    """
    _factory(PREFIX)  # before the worker says that it is ready

    def graded(source: str, place: str, response: str) -> tuple[str, float, str]:
        text = ANSWERS[answer](response)
        if text is None:
            return "no_answer", 0.0, ""
        problems = dataset(source)
        score = float(problems.score_answer(text, problems[int(place)]))
        return "graded", score if credit == "share" else float(score >= 1), ""

    return graded


def _last(pattern: re.Pattern[str]) -> Callable[[str], str | None]:
    """Return the function that gives the last match: its group, if there is one."""
    return lambda text: next((match.strip() for match in reversed(pattern.findall(text))), None)


ANSWERS: dict[str, Callable[[str], str | None]] = {"tag": _last(_TAG), "number": _last(_NUMBER), "whole": str.strip}


def _factory(source: str) -> Any:
    try:
        import pycosat  # noqa: F401
    except ImportError:
        # Installing it takes a C compiler, and only zebra_puzzles call it, but every dataset imports it.
        sys.modules.setdefault("pycosat", types.ModuleType("pycosat"))
    try:
        import reasoning_gym.factory
    except ImportError as e:
        raise ValueError(f"{source}: needs the package reasoning-gym ({e}); install tepo-megatron[reasoning-gym]") from None
    return reasoning_gym.factory


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _at_level(curriculum: Any, level: Any) -> dict[str, Any]:
    """Return the parameters that a curriculum sets where all its attributes are at that level."""
    if not isinstance(level, int) or isinstance(level, bool) or level < 0:
        raise ValueError(f"level={level!r} is no number of a level, which are counted from 0")
    for name, attribute in curriculum.attributes.items():
        curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
    config = curriculum.generate_configuration()
    return {
        field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name not in ("seed", "size")
    }
