"""Check what a run reads: model, prompts, benchmarks and the user's functions. Nothing of it is run or loaded."""

from __future__ import annotations

import ast
import glob
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.preflight.machines import host_path
from launch.profile import Cluster
from tepo_megatron.config import SLICE, Config

_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+){0,2}")
_FILE = re.compile(r"\.(jsonl?|ndjson|parquet|csv|txt|gz|sqsh)$", re.IGNORECASE)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_FIRST_BYTES = 4 * 2**20  # of a file of prompts, enough for its first row


def faults(cfg: Config, cluster: Cluster) -> Iterator[str]:
    """Yield the faults of what the run reads."""
    offline = any(cluster.environment.get(name, "0") not in ("0", "") for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"))
    for key, path in (("model.path", cfg.model.path), ("objective.ref_kl.path", cfg.objective.reference_path)):
        if path is not None:
            yield from _model(key, path, host_path(path, cluster))
    sets = [] if cfg.rollout.replay is not None else [("data.train", s.path, s.prompt_key) for s in cfg.data.sets]
    sets += [("data.eval", cfg.data.eval, cfg.data.prompt_key)] if cfg.data.eval is not None else []
    for key, source, prompt_key in sets:
        yield from _data(key, source, prompt_key, cluster, offline=offline)
    if cfg.rollout.replay is not None and not host_path(cfg.rollout.replay, cluster).exists():
        yield f"rollout.replay={cfg.rollout.replay} does not exist; give the folder of recorded rollouts (runs/NAME/rollouts)"
    if cfg.evaluation.benchmarks:
        yield from _benchmarks(cfg.evaluation.benchmarks, cfg.evaluation.benchmark_folder, cluster, offline=offline)
    for key, function in functions(cfg):
        yield from _function(key, function, cluster)


def functions(cfg: Config) -> list[tuple[str, str]]:
    """Return (key, FILE.py:NAME) of the user's functions."""
    named = [("rollout.function", cfg.rollout.function), ("objective.name", cfg.objective.path)]
    named += [(f"reward.terms[{i}].function", getattr(term, "function", None)) for i, term in enumerate(cfg.reward.terms)]
    return [(key, function) for key, function in named if function is not None]


def _model(key: str, path: str, folder: Path) -> Iterator[str]:
    """Yield the faults of a model's folder: missing, without config.json, tokenizer or weights, or fetched in part."""
    local = f"models/{Path(path).name}"
    fetch = f"fetch it (`hf download {path if _HUB.fullmatch(path) else 'ORG/NAME'} --local-dir {local}`) and give {key}"
    if not folder.is_dir():
        hub = _HUB.fullmatch(path) and not Path(path.partition("/")[0]).is_dir()
        what = "is a name on the Hugging Face hub, and a run reads a folder" if hub else "is no folder here"
        yield f"{key}={path} {what}; {fetch}"
        return
    if not (folder / "config.json").is_file():
        yield f"{key}={path}: config.json is not in it; {fetch}"
    if key == "model.path" and not any((folder / name).is_file() for name in _TOKENIZERS):
        yield f"{key}={path}: no tokenizer is in it ({', '.join(_TOKENIZERS)}); {fetch}"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            wanted = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            yield f"{key}={path}: {index.name} cannot be read; {fetch}"
            return
        if missing := sorted(name for name in wanted if not (folder / name).is_file()):
            yield f"{key}={path}: {missing[0]} and {len(missing) - 1} more of {len(wanted)} files are missing; {fetch}"
    elif not any(folder.glob("*.safetensors")):
        yield f"{key}={path}: no *.safetensors are in it; {fetch}"


def _data(key: str, source: str, prompt_key: str | None, cluster: Cluster, *, offline: bool) -> Iterator[str]:
    """Yield the faults of a set of prompts."""
    match = SLICE.fullmatch(source)
    path = match["source"] if match is not None else source
    place = host_path(path, cluster)
    files = [place] if place.exists() else [Path(name) for name in sorted(glob.glob(str(place)))]
    if not files and _HUB.fullmatch(path) and not _FILE.search(path) and not Path(path.partition("/")[0]).is_dir():
        if offline and not (cluster.container is None and _cached(path)):
            name = path.partition(":")[0]
            folder = f"data/{name.rpartition('/')[2]}"
            yield (
                f"{key}={source} is a dataset of the Hugging Face hub, and environment.HF_HUB_OFFLINE is set; fetch it "
                f"(`hf download --repo-type dataset {name} --local-dir {folder}`) and give {key}={folder}/*.parquet"
            )
        return
    if not files:
        yield f"{key}={source}: there is no such file here; correct the path, or fetch the file (docs/data.md)"
    for file in files:
        if file.is_file():
            yield from _first_row(key, source, file, prompt_key)


def _first_row(key: str, source: str, file: Path, prompt_key: str | None) -> Iterator[str]:
    """Yield the fault of a file that is empty, or whose first line is no row with a prompt."""
    if not os.access(file, os.R_OK):
        yield f"{key}={source}: {file} cannot be read by you; change its permissions"
    elif file.stat().st_size == 0:
        yield f"{key}={source}: {file} is empty; give a file with one JSON object per line"
    elif file.suffix in (".jsonl", ".ndjson"):
        with file.open("rb") as lines:
            line = next((line for line in iter(lambda: lines.readline(_FIRST_BYTES), b"") if line.strip()), b"")
        row: Any = None
        try:
            row = json.loads(line)
        except ValueError:
            if len(line) >= _FIRST_BYTES:
                return  # a long row, which the run judges
        if not isinstance(row, dict):
            yield f"{key}={source}: the first line of {file} is no JSON object; give a file with one per line"
        elif prompt_key is not None and prompt_key.partition(".")[0] not in row:
            found = ", ".join(list(row)[:8])
            yield f"{key}={source}: the first row has no {prompt_key!r} (it has {found}); set data.prompt_key to its name"


def _benchmarks(names: list[Any], folder: str | None, cluster: Cluster, *, offline: bool) -> Iterator[str]:
    """Yield the faults of the benchmarks' files. Without a file a benchmark is downloaded, which offline jobs cannot do."""
    fix = "put each there as NAME.jsonl (docs/evaluation.md), or set evaluation.benchmarks to null"
    place = None if folder is None else host_path(folder, cluster)
    if place is not None and not place.is_dir():
        yield f"evaluation.benchmark_folder={folder} is no folder here; make it and {fix}"
        return
    missing = [name for name in names if place is None or not (place / f"{name}.jsonl").is_file()]
    if missing and offline:
        yield (
            f"evaluation.benchmark_folder={folder or 'null'}: {', '.join(missing)} would be downloaded, and "
            f"environment.HF_HUB_OFFLINE is set; give a folder and {fix}"
        )
    for name in names:
        if place is not None and (file := place / f"{name}.jsonl").is_file() and file.stat().st_size == 0:
            yield f"evaluation.benchmark_folder={folder}: {name}.jsonl is empty; {fix}"


def _function(key: str, spec: str, cluster: Cluster) -> Iterator[str]:
    """Yield the fault of a function that its file does not define. The file is parsed, not run."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        yield f"{key}={spec} is not of the form path/to/file.py:name; correct it"
        return
    file = host_path(path, cluster)
    if not file.is_file():
        yield f"{key}={spec}: there is no file {file}; correct the path, which begins in the folder that launch is called in"
        return
    try:
        tree = ast.parse(file.read_text())
    except (SyntaxError, UnicodeDecodeError, OSError) as e:
        yield f"{key}={spec}: {path} cannot be parsed ({' '.join(str(e).split())}); correct it"
        return
    if name not in set(_defined(tree)):
        yield f"{key}={spec}: {path} defines no {name}; correct the name behind the colon"


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module may define, in branches of `if` and `try` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _cached(dataset: str) -> bool:
    """Return whether the hub's cache in the user's home has something of a dataset."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    return (hub / f"datasets--{dataset.partition(':')[0].replace('/', '--')}").is_dir()
