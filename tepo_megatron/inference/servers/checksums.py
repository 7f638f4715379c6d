"""Compare the checksums of the weights that servers report: with each other, and with the weights that were sent.

vLLM and SGLang hash each parameter of each of their ranks, under their own names, as it lies in memory: SHA-256 of the bytes
(SGLang on GPUs: a kernel of its own). The torch engine gives the CRC-32 of each tensor under its Hugging Face name. It takes as
long as copying and hashing the model, and nothing is sampled meanwhile. Parameters whose memory was freed are not covered, nor
are packed copies in their place: on CPU vLLM hashes the embedding and the norms, and no linear layer. Those are covered only by
the CRC-32 check on arrival (`receiver.py`) and the comparison of log-probs.
"""

import re
from collections.abc import Mapping

from tepo_megatron.errors import SyncError

_NOTHING = "e3b0c44298fc1c14"  # prefix of the SHA-256 of zero bytes; SGLang keeps only this prefix of a hash
# both engines fuse these parameters
_JOINED = (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."), (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj.")


class ChecksumChecks:
    """Consecutive checks of servers that hold the same model in the same layout."""

    def __init__(self, same_precision: bool) -> None:
        self._same_precision = same_precision
        self._served: Mapping[str, str] = {}
        self._sent: Mapping[str, int] = {}

    def compare(self, version: int, answers: Mapping[str, Mapping[str, str]], sent: Mapping[str, int]) -> None:
        """Compare one version's checksums. The first comparison only records them for the stale check."""
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
        if stale := self.stale(served, sent):
            raise SyncError(
                f"weights of version {version}: {', '.join(known)} still serve{'s' * (len(known) == 1)} those of before: "
                f"{_some(stale)}"
            )
        self._served, self._sent = served, dict(sent)

    def stale(self, served: Mapping[str, str], sent: Mapping[str, int]) -> list[str]:
        """Return the Hugging Face names of tensors whose sent CRC-32 changed since the last `compare`, and their checksums not.

        A tensor with several parts, one for each rank, is stale if no part changed. Where the servers serve another precision
        (`same_precision`), the result is empty unless all changed tensors are stale.
        """
        parts: dict[str, list[str]] = {}
        for key in served:
            parts.setdefault(key.rpartition(":")[2], []).append(key)
        theirs = {name: name if name in parts else _theirs(name) for name in self._sent}
        changed = [name for name, crc32 in self._sent.items() if sent.get(name, crc32) != crc32 and theirs[name] in parts]
        stale = [n for n in changed if all(served[key] == self._served.get(key) for key in parts[theirs[n]])]
        return stale if self._same_precision or len(stale) == len(changed) else []


def _theirs(name: str) -> str:
    for pattern, joined in _JOINED:
        name = pattern.sub(joined, name)
    return name


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(sorted(names)[:5]) + more
