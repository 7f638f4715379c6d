"""Write tensors and texts to one safetensors file with a checksum of the whole content, and read them back."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tepo_megatron.base.storage import PARTIAL, replacing, writing

_SUM = "crc32"
# Everything that a file which is no such file, or whose content is wrong, raises while it is read and taken apart.
DAMAGE = (OSError, SafetensorError, KeyError, TypeError, ValueError, IndexError, RuntimeError, OverflowError)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], text: Mapping[str, str]) -> None:
    """Write a file atomically. Its folder is made if it is missing."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=False, temporary=path.with_suffix(PARTIAL)) as unfinished:
            save_file(dict(tensors), unfinished, {**text, _SUM: _sum_of(tensors, text)})
            follow_umask(unfinished)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the texts of `write_tensors`. Raises one of DAMAGE for a file that is missing or damaged."""
    with safe_open(path, framework="pt") as f:
        tensors, text = {name: f.get_tensor(name) for name in f.keys()}, dict(f.metadata())  # noqa: SIM118
    if text.pop(_SUM) != _sum_of(tensors, text):
        raise ValueError("its checksum differs")
    return tensors, text


def follow_umask(path: Path) -> None:
    """Give a file the mode that any new file of this process has, because safetensors creates files with mode 0600. Raises
    OSError.
    """
    status = Path("/proc/self/status").read_text()
    umask = int(status.split("Umask:")[1].split()[0], 8)  # `os.umask` would change it for a moment, in all threads
    path.chmod(0o666 & ~umask)


def _sum_of(tensors: Mapping[str, Tensor], text: Mapping[str, str]) -> str:
    crc = zlib.crc32(json.dumps(sorted(text.items())).encode())
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].numpy(), zlib.crc32(name.encode(), crc))
    return f"{crc:08x}"
