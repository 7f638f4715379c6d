"""Slices: the part of a tensor that one rank of a server holds (`sync.transport.slices`).

Both engines divide linear layers, experts and embeddings over their tensor-parallel ranks in equal parts along one dimension,
in the order of the ranks. So rank j of every server needs the j-th part, and its loader cuts that part out of the whole tensor.
A receiver gives the loader a whole tensor in which only that part is filled in; the rest is not a number. The part's place
is in its name on the wire. Runs in the trainer and inside the servers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_SEPARATOR = "#"  # in no Hugging Face name


@dataclass(frozen=True)
class TensorSlice:
    """The place of a part in its tensor.

    Attributes:
        name: Hugging Face name of the tensor.
        lane: Rank of a server that holds the part.
        dim: Dimension along which the tensor is divided; None: every rank holds all of it.
    """

    name: str
    lane: int
    lanes: int
    dim: int | None

    @property
    def key(self) -> str:
        """The name of the part on the wire."""
        dim = "" if self.dim is None else self.dim
        return _SEPARATOR.join(map(str, (self.name, self.lane, self.lanes, dim)))

    @classmethod
    def of_key(cls, key: str) -> "TensorSlice":
        """Return the place of a part by its name on the wire; a plain name is a whole tensor of a server with one rank."""
        if _SEPARATOR not in key:
            return cls(key, 0, 1, None)
        name, lane, lanes, dim = key.split(_SEPARATOR)
        return cls(name, int(lane), int(lanes), int(dim) if dim else None)

    def whole_shape(self, part: tuple[int, ...]) -> list[int]:
        """Return the shape of the whole tensor, given that of the part."""
        return [size * (self.lanes if dim == self.dim else 1) for dim, size in enumerate(part)]

    def embedded(self, part: Tensor) -> Tensor:
        """Return a whole tensor that has the part in its place, and is not a number elsewhere (0 for integers)."""
        if self.dim is None:
            return part
        filler = torch.nan if part.is_floating_point() else 0
        whole = part.new_full(self.whole_shape(tuple(part.shape)), filler)
        length = part.size(self.dim)
        whole.narrow(self.dim, self.lane * length, length).copy_(part)
        return whole


def sliced(name: str, tensor: Tensor, lanes: int, dim: int | None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name on the wire, part) for each lane; one lane: the tensor itself."""
    if lanes == 1:
        yield name, tensor
        return
    for lane in range(lanes):
        place = TensorSlice(name, lane, lanes, dim)
        if dim is None:
            yield place.key, tensor
        else:
            length = tensor.size(dim) // lanes
            yield place.key, tensor.narrow(dim, lane * length, length)


def refuse_gaps(model: torch.nn.Module) -> None:
    """Raise ValueError if a parameter is not a number: the engine divides it in another way than `TensorSlice` says."""
    gaps = [name for name, p in model.named_parameters() if p.is_floating_point() and p.numel() and p.isnan().any()]
    if gaps:
        raise ValueError(
            f"{len(gaps)} parameters have gaps, as the engine does not divide them as sync.transport.slices=true expects: "
            f"{', '.join(gaps[:5])}; set it to false"
        )
