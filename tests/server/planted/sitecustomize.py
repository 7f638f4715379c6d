"""Wrong weights inside a real server of either engine, whose Python finds this file by PYTHONPATH and runs it at its start.

The server's `RankReceiver` is changed once it is imported. The file that TEPO_TEST_FAULT names holds {"run": a name, "kind":
"dropped" or "one tensor", "first": n}: in each run the updates from the n-th on (from 0) do not reach the model, or all of them
but a tensor that stays as it was before. The server answers, in every word, as it does without.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INBOX = "tepo_megatron.weight_sync.receiver.receiver"
CONTROL = "TEPO_TEST_FAULT"
TENSOR = "model.layers.1.mlp.down_proj.weight"


class Planting(importlib.abc.MetaPathFinder):
    """An import hook that finds the module as the others do, and plants the fault once the module has run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != INBOX:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            plant(module.RankReceiver)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def plant(inbox_class: Any) -> None:
    begin, take = inbox_class.begin, inbox_class.take

    def faulty_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        control = json.loads(Path(os.environ[CONTROL]).read_text())
        state = vars(self).setdefault("_planted", {"run": None, "updates": 0, "before": {}})
        if control["run"] != state["run"]:
            state |= {"run": control["run"], "updates": 0}
        state["kind"] = control["kind"] if state["updates"] >= control["first"] else ""
        state["updates"] += 1

    def faulty_take(self: Any, sources: Any) -> Any:
        arrived, state = take(self, sources), self._planted
        if arrived is None or state["kind"] == "dropped":
            return None
        return with_old_tensor(arrived, state["before"], state["kind"] == "one tensor")

    inbox_class.begin, inbox_class.take = faulty_begin, faulty_take


def with_old_tensor(arrived: Iterator[tuple[str, Any]], before: dict[str, Any], stale: bool) -> Iterator[tuple[str, Any]]:
    """Yield the arriving tensors, with TENSOR replaced by its old value if `stale`.

    Args:
        arrived: Tensors of the update.
        before: Value of TENSOR before the update; stored here when it is not stale.
        stale: Whether to replace it.
    """
    for name, tensor in arrived:
        if name == TENSOR and not stale:
            before[name] = tensor.clone()
        yield name, before[name] if name == TENSOR else tensor


if CONTROL in os.environ:
    sys.meta_path.insert(0, Planting())
