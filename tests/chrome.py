"""Check a trace against the Trace Event Format: what ui.perfetto.dev and chrome://tracing need to show it."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

Event = Mapping[str, Any]


def rows(trace: Mapping[str, Any]) -> dict[tuple[str, str], list[Event]]:
    """Return the complete events by (process, row), in the order of time. Assert that the trace is valid.

    Complete events need `dur`, instants a scope, flows an id that begins once and ends once, inside of a span. Spans of one
    thread are nested.
    """
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} <= set("MXistf")
    names = {(e["pid"], e["tid"], e["name"]): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    found: dict[tuple[str, str], list[Event]] = defaultdict(list)
    flows: dict[int, list[Event]] = defaultdict(list)
    last = 0.0  # nothing is before the trace
    for event in events:
        if event["ph"] == "M":
            continue
        where = names[event["pid"], 0, "process_name"], names[event["pid"], event["tid"], "thread_name"]
        assert isinstance(event["ts"], float) and isinstance(event["name"], str)
        if event["ph"] in "Xi":
            assert event["ts"] >= last, "the events are not in the order of time"
            last = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            found[where].append(event)
        elif event["ph"] == "i":
            assert event["s"] in "gpt"
        else:
            spans = found[where]
            assert event["bp"] == "e" and any(s["ts"] <= event["ts"] <= s["ts"] + s["dur"] for s in spans)
            flows[event["id"]].append(event)
    for chain in flows.values():
        assert [e["ph"] for e in chain] == ["s", *["t"] * (len(chain) - 2), "f"]
        assert len({(e["name"], e["cat"]) for e in chain}) == 1
        assert sorted(e["ts"] for e in chain) == [e["ts"] for e in chain]
    for where, spans in found.items():
        ends: list[float] = []
        for span in spans:
            while ends and ends[-1] <= span["ts"] + 1e-3:  # a nanosecond, in which times are rounded
                ends.pop()
            end = span["ts"] + span["dur"]
            assert not ends or end <= ends[-1] + 1e-3, f"{where}: {span} is not nested"
            ends.append(end)
    return dict(found)


def named(trace: Mapping[str, Any], process: str, row: str, name: str) -> list[Event]:
    return [span for span in rows(trace).get((process, row), []) if span["name"] == name]
