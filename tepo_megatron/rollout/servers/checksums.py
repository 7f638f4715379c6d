"""What servers say that they serve, compared: with each other, and with what was sent.

vLLM and SGLang hash each parameter of each of their ranks, under names of their own, as it lies in memory: SHA-256 of the
bytes (SGLang on GPUs: a kernel of its own). It takes as long as copying and hashing the model, in which nothing is sampled.
Nothing is known of a parameter whose memory was freed, nor of a packed copy in its place: on CPU vLLM hashes the embedding and
the norms, and no linear layer; for those the CRC-32 at the door (`inbox.py`) and the comparison of log-probs stand alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tepo_megatron.errors import SyncError

_NOTHING = "e3b0c44298fc1c14"  # how the SHA-256 of no bytes begins, all that SGLang keeps of one
# both engines join these
_JOINED = (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."), (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj.")


class Checks:
    """One after the other, of servers that hold the same model in the same way.

    same_precision: they serve what is sent as it is; otherwise a small change of a tensor may vanish in the cast.
    """

    def __init__(self, same_precision: bool) -> None:
        self._same_precision = same_precision
        self._served: Mapping[str, str] = {}
        self._sent: Mapping[str, int] = {}

    def compare(self, version: int, answers: Mapping[str, Mapping[str, str]], sent: Mapping[str, int]) -> None:
        """Raise SyncError when servers differ, or have what they had at the last check of a tensor that is another now.

        answers: server -> "rank:parameter" -> checksum; sent: Hugging Face name -> CRC-32, of the version.
        """
        known = {
            server: {name: c for name, c in them.items() if not c.startswith(_NOTHING)} for server, them in answers.items()
        }
        if not known:
            return
        first, served = next(iter(known.items()))
        for server, them in known.items():
            different = sorted(name for name in served.keys() | them.keys() if served.get(name) != them.get(name))
            if different:
                raise SyncError(f"weights of version {version}: {first} and {server} serve different ones: {_some(different)}")
        stale = self._stale(served, sent)
        if stale:
            raise SyncError(
                f"weights of version {version}: {', '.join(known)} still serve{'s' * (len(known) == 1)} those of before: "
                f"{_some(stale)}"
            )
        self._served, self._sent = served, dict(sent)

    def _stale(self, served: Mapping[str, str], sent: Mapping[str, int]) -> list[str]:
        """Hugging Face names of tensors that changed, while no rank's part of them did."""
        parts: dict[str, list[str]] = {}
        for key in served:
            parts.setdefault(key.rpartition(":")[2], []).append(key)
        changed = [name for name, crc32 in self._sent.items() if sent.get(name, crc32) != crc32 and _theirs(name) in parts]
        stale = [n for n in changed if all(served[key] == self._served.get(key) for key in parts[_theirs(n)])]
        return stale if self._same_precision or len(stale) == len(changed) else []


def _theirs(name: str) -> str:
    """The engines' name of the parameter that holds this tensor."""
    for pattern, joined in _JOINED:
        name = pattern.sub(joined, name)
    return name


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(sorted(names)[:5]) + more
