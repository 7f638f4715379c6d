"""Wrong weights inside a real server of either engine, whose Python finds this file by PYTHONPATH and runs it at its start.

The server's `RankReceiver` is changed once it is imported. The file that TEPO_TEST_FAULT names holds {"run": a name, "kind": a
name, "first": n, "last": n or missing}: in each run the updates from the first to the last (from 0) are faulty. "dropped": the
model does not get them. "one shard": its second tensor-parallel rank does not. "one tensor", "one layer": they stay as they
were before. "scaled": a tensor is multiplied. The server answers, in every word, as it does without.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INBOX = "tepo_megatron.wire.receiver.receiver"
CONTROL = "TEPO_TEST_FAULT"
LAYER = "model.layers.1."
TENSOR = f"{LAYER}mlp.down_proj.weight"
SCALE = 1.0625


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
        faulty = control["first"] <= state["updates"] <= control.get("last", state["updates"])
        state["kind"] = control["kind"] if faulty else ""
        state["updates"] += 1

    def faulty_take(self: Any, sources: Any) -> Any:
        arrived, state = take(self, sources), self._planted
        if arrived is None or state["kind"] == "dropped" or (state["kind"] == "one shard" and _rank() == 1):
            return None
        return with_fault(arrived, state["before"], state["kind"])

    inbox_class.begin, inbox_class.take = faulty_begin, faulty_take


def _rank() -> int:
    import torch.distributed as dist

    return int(dist.get_rank()) if dist.is_initialized() else 0


def with_fault(arrived: Iterator[tuple[str, Any]], before: dict[str, Any], kind: str) -> Iterator[tuple[str, Any]]:
    """Yield the arriving tensors, some of them with another value."""
    for name, tensor in arrived:
        if not kind and LAYER in name:
            before[name] = tensor.clone()
        stale = name == TENSOR if kind == "one tensor" else kind == "one layer" and LAYER in name
        yield name, before[name] if stale else tensor * SCALE if kind == "scaled" and name == TENSOR else tensor


if CONTROL in os.environ:
    sys.meta_path.insert(0, Planting())
