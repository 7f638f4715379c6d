"""Nothing is unpickled or evaluated that others could have written: the calls that could, and hostile checkpoint metadata."""

import ast
import builtins
import collections
import operator
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tepo_megatron.base.errors import CheckpointError
from tepo_megatron.base.restricted_pickle import METADATA, load_metadata, restricted_loading
from tepo_megatron.checkpoint.convert.dist_reader import DistCheckpointReader as ConversionReader
from tepo_megatron.checkpoint.restoring import SliceReader as ResumeReader
from tepo_megatron.evaluation.command import hf_model

PACKAGE = Path(__file__).parents[2] / "tepo_megatron"
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
READS = {"load", "loads", "Unpickler", "open"}
NAMES = {"eval", "exec", "compile", "__import__"}
WORDS = re.compile("|".join([*MODULES, *NAMES, "exec_module", r"load\(", "load_all", "read_pickle", "trust_remote_code"]))
# file -> what it may call, with the reason
ALLOWED = {
    "base/restricted_pickle.py": {"pickle.Unpickler"},  # with its own find_class
    "checkpoint/rng_state.py": {"torch.load(weights_only=True)"},
    "checkpoint/convert/dist_reader.py": {"torch.load(weights_only=True)"},
    "config/yaml_text.py": {"yaml.load(_Loader)"},  # a SafeLoader that refuses doubled keys
    "engines/vllm.py": {"np.load(allow_pickle=False)"},
    "rewards/grading/calls.py": {"exec", "compile"},  # a model's program, inside of a sandbox: this file is only text outside
    "rewards/grading/asserts.py": {"exec"},  # a dataset's tests, inside of a sandbox
    "base/user_file.py": {"exec", "compile"},  # a Python file that the user's config names
}


def risky_calls(source: str) -> set[str]:
    """Yield the calls that could execute what they read, as `ALLOWED` spells them. Base classes count as calls."""
    found: set[str] = set()
    if not WORDS.search(source):  # most files, which need not be parsed
        return found
    for node in ast.walk(ast.parse(source)):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            if ast.unparse(base).split(".")[0] in MODULES and not ast.unparse(base).endswith("Error"):
                found.add(ast.unparse(base))
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found.add(f"from {node.module}")
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            found.add("trust_remote_code")
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        owner, _, attribute = name.rpartition(".")
        words = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if (owner in MODULES and attribute in READS) or name in NAMES or attribute == "exec_module":
            found.add(name if owner in MODULES or not owner else attribute)
        elif name in ("torch.load", "np.load", "numpy.load", "pd.read_pickle", "pandas.read_pickle"):
            given = [f"{k}={words[k]}" for k in ("weights_only", "allow_pickle") if k in words]
            found.add(f"{name}({', '.join(given)})")
        elif owner == "yaml" and attribute != "safe_load" and attribute.endswith(("load", "load_all")):
            found.add(name + (f"({words['Loader']})" if "Loader" in words else ""))
    return found


def test_no_call_of_the_package_executes_what_it_reads() -> None:
    """A new one fails here: use JSON, safetensors or `restricted_pickle.load_metadata` instead."""
    found = {str(path.relative_to(PACKAGE)): risky_calls(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    found = {path: calls for path, calls in found.items() if calls}
    assert found == ALLOWED


def whole() -> Metadata:
    """Write metadata as PyTorch and Megatron-Core do."""
    tensor = TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16), torch.Size((4,)), [ChunkStorageMetadata(torch.Size((0,)), torch.Size((4,)))]
    )
    places = {
        MetadataIndex("a", [0]): _StorageInfo("__0_0.distcp", 0, 8),
        MetadataIndex("b"): _StorageInfo("__0_0.distcp", 8, 2),
    }
    order = collections.OrderedDict(a=("model", "a"))
    return Metadata({"a": tensor, "b": BytesStorageMetadata()}, order, places, StorageMeta(Path("/somewhere")))


class Calls:
    """Pickled, it is a call of `function` with `arguments`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def attribute_of_class(folder: Path) -> bytes:
    """BUILD with attributes for the class itself, as no pickler writes it."""
    return b"\x80\x04" + b"ctorch.distributed.checkpoint.metadata\nMetadata\n" + b"N}\x8c\x07plantedK\x01s\x86b."


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "a command": lambda f: Calls(os.system, f"touch {f}/executed"),
    "a command inside the metadata": lambda f: Metadata({"a": Calls(os.system, f"touch {f}/executed")}, None, {}),
    "a file that is written": lambda f: Calls(builtins.open, f"{f}/executed", "w"),
    "eval": lambda f: Calls(builtins.eval, f"open('{f}/executed', 'w')"),
    "getattr of a module": lambda f: Calls(getattr, Calls(__import__, "os"), "system"),
    "attrgetter": lambda f: Calls(operator.attrgetter("system"), Calls(__import__, "os")),
    "a rebuilt tensor": lambda f: torch.zeros(2),
    "a parameter": lambda f: torch.nn.Parameter(torch.zeros(2)),
    "torch.load": lambda f: Calls(torch.load, f"{f}/other"),
    "a storage of torch": lambda f: Calls(torch._utils._rebuild_tensor_v2, torch.zeros(1).untyped_storage(), 0, (1,)),
    "what is imported": lambda f: Calls(__import__, "antigravity"),
    "a builtin class": lambda f: Calls(map, Calls, [1]),
    "a dotted name": lambda f: b"\x80\x04\x8c\x05torch\x8c\x17Size.__class__.__base__\x93.",
    "a module of torch": lambda f: b"ctorch\nhub\n.",
    "a subprocess": lambda f: b"csubprocess\nPopen\n(S'touch'\ntR.",
    "an old instance": lambda f: b"(S'touch'\nios\nsystem\n.",
    "an extension code": lambda f: b"\x80\x02\x82\x01.",
    "a persistent id": lambda f: b"Px\n.",
    "an attribute of a class": attribute_of_class,
    "no metadata": lambda f: {"a": 1},
    "places in no dict": lambda f: Metadata({}, None, None),
    "a file elsewhere": lambda f: Metadata({}, None, {MetadataIndex("a"): _StorageInfo("../other", 0, 1)}),
    "an absolute file": lambda f: Metadata({}, None, {MetadataIndex("a"): _StorageInfo("/etc/passwd", 0, 1)}),
    "nothing": lambda f: b"",
    "half of it": lambda f: pickle.dumps(whole())[:100],
}  # fmt: skip


def megatron_loads(folder: Path) -> None:
    """Load a checkpoint with Megatron-Core, as `tepo verify` does."""
    with restricted_loading():
        FileSystemReader(folder).read_metadata()


def evaluation_loads(folder: Path) -> None:
    """Convert a Megatron checkpoint to a model, as `tepo evaluate` does, in a folder of its own."""
    lines: list[str] = []
    (folder / "scratch").mkdir()
    with hf_model(folder, folder / "scratch", lines.append):
        raise AssertionError("it was converted")


READERS = {
    "resume": ResumeReader.open, "conversion": ConversionReader, "verification": megatron_loads, "evaluation": evaluation_loads,
}  # fmt: skip


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_metadata_is_refused_and_executes_nothing(what: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    made = HOSTILE[what](tmp_path)
    (tmp_path / METADATA).write_bytes(made if isinstance(made, bytes) else pickle.dumps(made))
    before = dict(vars(Metadata))
    with pytest.raises(CheckpointError, match=METADATA):
        read(tmp_path)
    assert not (tmp_path / "executed").exists() and dict(vars(Metadata)) == before


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_as_torch_writes_it_is_read(protocol: int, tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(pickle.dumps(whole(), protocol))
    found = load_metadata(tmp_path)
    assert found.state_dict_metadata == whole().state_dict_metadata and found.storage_data == whole().storage_data
    assert FileSystemReader.read_metadata is not load_metadata
