"""Bring the rollouts of a step from the service to all ranks.

The ranks on the machine of the service map its files. Rank 0 broadcasts the tokens once to each other machine, where the lowest
rank keeps them in a file for the others. The experts of MoE models are far larger: a machine gets those of a sequence once its
ranks pack the sequence, and at most once in a step.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from tepo_megatron.base.types import Rollout, SamplingMask
from tepo_megatron.dist.objects import all_gather_object
from tepo_megatron.service.batch_memory import BatchHeader, experts_of, map_file, new_file, token_arrays

if TYPE_CHECKING:
    from tepo_megatron.dist.parallel import ParallelDims

_PID_NAMESPACE, _BOOT = Path("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id")
MESSAGE_BYTES = 64 * 2**20  # of experts, roughly: a message has whole sequences


class BatchReceiver:
    """Brings batches from the service to all ranks. Make one with `open`; all ranks make the same calls."""

    def __init__(
        self,
        groups: "ParallelDims",
        machines: Sequence[Sequence[int]],
        dp_ranks: Sequence[int],
        leaders: dist.ProcessGroup | None,
    ) -> None:
        self._groups, self._leaders = groups, leaders
        self._machine = next(place for place, ranks in enumerate(machines) if groups.rank in ranks)
        self._machines, self._leader = machines, machines[self._machine][0]
        self._dp_ranks = [sorted({dp_ranks[rank] for rank in ranks}) for ranks in machines]  # of each machine
        self._fetched = [set[int]() for _ in machines]  # by machine: ids of the sequences whose experts it has
        self._experts: dict[int, Tensor] = {}  # by id of the sequence, in the file of this machine
        self.expert_bytes = 0

    @classmethod
    def open(cls, groups: "ParallelDims", machine: object | None = None) -> "BatchReceiver":
        """Find out which ranks share a machine. Collectives: one all-gather over the host group, one new group.

        `machine`: equal for the ranks that see each other's files below /proc. None: found out.
        """
        machines: dict[object, list[int]] = {}
        mine = (_BOOT.read_text(), os.readlink(_PID_NAMESPACE)) if machine is None else machine
        ranks = all_gather_object((mine, groups.dp.rank), groups.host)
        for rank, (its, _) in enumerate(ranks):
            machines.setdefault(its, []).append(rank)
        leaders = [ranks[0] for ranks in machines.values()]
        group = dist.new_group(leaders, groups.limit, dist.get_backend(groups.host)) if len(leaders) > 1 else None
        return cls(groups, list(machines.values()), [dp for _, dp in ranks], group if groups.rank in leaders else None)

    def receive(self, header: BatchHeader) -> list[Rollout]:
        """Return the rollouts of a header that every rank has: a rollout batch, or one of its minibatches.

        When it returns on any rank, the service may release the files. Collectives: an all-gather and a barrier over the host
        group; with several machines one broadcast over their lowest ranks.
        """
        groups, copies = self._groups, list[int]()
        paths = header.path, header.experts_path
        if self._leaders is not None and header.nbytes:
            copies, paths = self._exchange(header)
        path, experts_path = all_gather_object(paths, groups.host)[self._leader]
        rollouts = read(header, path, experts_path)
        if header.experts is not None:
            self._experts |= {i: r.experts_LKT for i, r in zip(header.ids, rollouts, strict=True) if r.experts_LKT is not None}
        self._fetched[0].update(header.ids)
        dist.barrier(group=groups.host)
        for copy in copies:
            os.close(copy)
        return rollouts

    def release(self) -> None:
        """Let go of the batch, which is not trained on any more."""
        self._experts, self.expert_bytes = {}, 0
        self._fetched = [set[int]() for _ in self._machines]

    def fetch_experts(self, needed: Sequence[Sequence[int]]) -> None:
        """Write experts into the files of the machines whose ranks are about to read them.

        Collectives: where a machine lacks some, messages between the lowest ranks of the machines, and a barrier over the host
        group; else none.
        """
        lacking = [
            sorted({i for dp in ranks for i in needed[dp]} - fetched)
            for ranks, fetched in zip(self._dp_ranks, self._fetched, strict=True)
        ]
        if not self._experts or not any(lacking):
            return
        for machine, (indices, fetched) in enumerate(zip(lacking, self._fetched, strict=True)):
            fetched.update(indices)
            if machine and machine == self._machine:
                self.expert_bytes += sum(self._experts[i].nbytes for i in indices)
            if machine and indices and self._leaders is not None:
                self._send_experts(machine, indices)
        dist.barrier(group=self._groups.host)

    def _send_experts(self, machine: int, indices: Sequence[int]) -> None:
        """Send the experts of some sequences from rank 0 to the lowest rank of a machine; other ranks do nothing."""
        if not self._groups.is_main and self._machine != machine:
            return
        for part in self._messages(indices):
            flat = [self._experts[i].reshape(-1).view(torch.uint8) for i in part]
            if self._groups.is_main:
                dist.send(torch.cat(flat), group=self._leaders, group_dst=machine)
                continue
            message = torch.empty(sum(x.numel() for x in flat), dtype=torch.uint8)
            dist.recv(message, group=self._leaders, group_src=0)
            for x, received in zip(flat, message.split([x.numel() for x in flat]), strict=True):
                x.copy_(received)

    def _messages(self, indices: Sequence[int]) -> list[list[int]]:
        messages: list[list[int]] = [[]]
        size = 0
        for i in indices:
            if messages[-1] and size + self._experts[i].nbytes > MESSAGE_BYTES:
                messages.append([])
                size = 0
            messages[-1].append(i)
            size += self._experts[i].nbytes
        return messages

    def _exchange(self, header: BatchHeader) -> tuple[list[int], tuple[str, str]]:
        """Broadcast the tokens to the lowest ranks of all machines; return the opened files and the paths on this machine."""
        if self._groups.is_main:
            file, paths = os.open(header.path, os.O_RDWR), (header.path, header.experts_path)
            files = [file]
        else:
            file, path = new_file()
            experts_file, experts_path = new_file() if header.experts is not None else (-1, "")
            files, paths = [x for x in (file, experts_file) if x >= 0], (path, experts_path)
        with map_file(file, header.nbytes) as memory:
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            dist.broadcast(flat, 0, group=self._leaders)
            del flat
        return files, paths


def read(header: BatchHeader, path: str, experts_path: str) -> list[Rollout]:
    """Return the rollouts. They lie in the shared files; a write to log-probs and masks stays in this process.

    Experts may be written into the file later (`BatchReceiver.fetch_experts`).
    """
    if not header.lengths:
        return []
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), header.nbytes, access=mmap.ACCESS_COPY)
    arrays = token_arrays(header, memory)
    arrays["token_ids_L"] = arrays["token_ids_L"].long()
    if header.experts is not None:
        file_of_experts = os.open(experts_path, os.O_RDWR)
        arrays["experts_LKT"] = experts_of(header, map_file(file_of_experts, header.tokens * header.expert_bytes))
        os.close(file_of_experts)
    masks = SamplingMask(arrays.pop("ids_M"), arrays.pop("counts_N"))
    per_token: dict[str, Sequence[Tensor | SamplingMask]] = {n: array.split(header.lengths) for n, array in arrays.items()}
    if header.masks[0]:
        per_token["sampling_mask"] = masks.split([int(mask.sum()) for mask in arrays["response_mask_L"].split(header.lengths)])
    fields = {**header.columns, "prompt_experts": header.prompt_experts, **per_token}
    return [Rollout(**{name: values[i] for name, values in fields.items()}) for i in range(len(header.lengths))]
