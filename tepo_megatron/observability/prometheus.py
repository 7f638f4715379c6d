"""The text format of Prometheus: names by a rule, samples as text, and the metrics of several servers as one text.

    key of a step's record    name
    reward/mean               tepo_step_reward_mean
    tepo/dH_up_p05            tepo_step_tepo_dH_up_p05

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4).
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "tepo_"  # of all names of ours; servers may not use it
STEP_PREFIX = "tepo_step_"
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\.)*"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{((?:{_LABEL})(?:,{_LABEL})*)?,?\}})? +([0-9eE.+-]+|NaN|[+-]?Inf)(?: +-?[0-9]+)?")
_HEADER = re.compile(rf"# (HELP|TYPE) ({_NAME})(?: (.*))?")
_SERVER_LABEL = re.compile(r'(^|,)server=(?="(?:[^"\\\n]|\\.)*"(?:,|$))')


@dataclass(frozen=True)
class MetricFamily:
    """A metric with all of its samples."""

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    samples: Sequence[tuple[Mapping[str, str], float]]


def step_name(key: str) -> str:
    """Return the name of a value of a step's record: every character but letters, digits and _ becomes _."""
    return STEP_PREFIX + _NOT_A_NAME.sub("_", key)


def of_step(record: Mapping[str, float | None]) -> list[MetricFamily]:
    """Return one gauge for each value of a step's record that was measured."""
    return [
        MetricFamily(step_name(key), "gauge", f"{key} of the last step", [({}, value)])
        for key, value in record.items()
        if value is not None
    ]


def as_text(found: Iterable[MetricFamily]) -> str:
    """Return metrics as text, those without samples left out."""
    lines = []
    for family in found:
        if family.samples:
            lines += [f"# HELP {family.name} {_escaped_help(family.text)}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{family.name}{_braces(labels)} {_number(value)}" for labels, value in family.samples]
    return "".join(line + "\n" for line in lines)


def _braces(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}" if labels else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(float(value)) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")


@dataclass
class _ServerFamily:
    headers: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def merge_servers(texts: Mapping[str, str]) -> str:
    """Return the metrics of several servers as one text, in which each sample has a label `server`.

    A server's own label of that name becomes `exported_server`. Lines that are not of the format, and names that begin with
    `tepo_`, are left out, so a faulty server can neither break the text nor report for the run.
    """
    found: dict[str, _ServerFamily] = {}
    for server, text in texts.items():
        current = ""
        for line in text.split("\n"):
            if (header := _HEADER.fullmatch(line)) is not None:
                current = header[2]
                if not current.startswith(PREFIX):
                    found.setdefault(current, _ServerFamily()).headers.setdefault(header[1], line)
            elif (sample := _SAMPLE.fullmatch(line)) is not None and not sample[1].startswith(PREFIX):
                family = current if current and sample[1].startswith(current) else sample[1]
                labels = _SERVER_LABEL.sub(r"\1exported_server=", sample[2]) if sample[2] else ""
                named = f'{{server="{_escaped(server)}"{"," if labels else ""}{labels}}}'
                found.setdefault(family, _ServerFamily()).samples.append(f"{sample[1]}{named} {sample[3]}")
    lines = [line for one in found.values() if one.samples for line in (*one.headers.values(), *one.samples)]
    return "".join(line + "\n" for line in lines)
