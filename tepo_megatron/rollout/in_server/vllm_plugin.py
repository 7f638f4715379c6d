"""A weight-transfer backend of vLLM that takes what `inbox.py` takes, on CPU and GPU. Runs inside the vLLM server.

vLLM finds `register` through the entry point `vllm.general_plugins`; `--weight-transfer-config '{"backend": "tepo_shm"}'`
selects it. Of this package it imports `inbox.py` and what that needs: the server loads nothing of the trainer. Facts are of
vLLM 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from tepo_megatron.channel import Kept, Meeting
from tepo_megatron.own_peers import guard_process_groups
from tepo_megatron.rollout.in_server import lifeline
from tepo_megatron.rollout.in_server.inbox import Inbox

BACKEND = "tepo_shm"
_OWN = "_tepo_own"  # attribute of tensors that `own_waiting_tensors` made
_LAYER = re.compile(r"model\.layers\.\d+\.")


def register() -> None:
    """Make the backend known, end with the server, and have no other user in a process group; vLLM calls this in each of its
    processes, in some of them twice."""
    lifeline.hold()
    guard_process_groups()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, InboxEngine.__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """meeting: the fields of a `Meeting` to join; None: files need none. kept: those of a `Kept`, in an update."""

    meeting: dict[str, Any] | None = None
    kept: dict[str, Any] | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """sources: of some of the model's tensors under their Hugging Face names. See `Inbox.take`."""

    sources: list[str]


class InboxEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Replaces all weights but those that stay by those that are sent: `start_weight_update`, `update_weights` for each round,
    `finish_weight_update`. After an error of the last two vLLM has to be started again.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _inbox: Inbox | None = None
    _touched = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """At the start, whenever there are new groups to join, and when an update leaves tensors out."""
        self._inbox = self._inbox or Inbox()
        if init_info.meeting is not None:
            self._inbox.join(Meeting(**init_info.meeting), self.device)
        if init_info.kept is not None:
            self._inbox.keep(Kept(**init_info.kept))

    def start_weight_update(self) -> None:
        """Forget what an earlier update gave; the model is touched by the first tensors that may be loaded."""
        assert self._inbox is not None, "the trainer calls init_transfer_engine first"
        self._inbox.begin(self.model_config.model, self.model_config.hf_config.tie_word_embeddings, self.device)
        self._touched = False

    def update_weights(self, update_info: dict[str, object]) -> None:
        """The base class without its `torch.accelerator.synchronize()`, which raises where there is no accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a round, a tensor at a time, unless it did not arrive or is here already.

        Raises ValueError, with the model as it was, if it holds a tensor that is not the model's, has not its shape, or was
        given before in this update (a cast to the model's dtype is no fault).
        """
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        assert self._inbox is not None, "the trainer calls init_transfer_engine first"
        arrived = self._inbox.take(update_info.sources)
        if arrived is None:
            return
        if not self._touched:
            # Back to the layout of a checkpoint: on CPU the linear weights are packed, and their originals freed.
            if self.device.type == "cpu":
                _forget_packed_experts(self.model, self._inbox.kept)
            initialize_layerwise_reload(self.model)
            self._touched = True
        if self._inbox.lent:  # the trainer writes over its memory two rounds later, when a module may still wait for others
            arrived = ((name, tensor.clone()) for name, tensor in arrived)
        self.model.load_weights(arrived)
        if not self._inbox.lent:
            own_waiting_tensors(self.model)

    def finish_weight_update(self) -> None:
        """Pack what is packed and put the weights where the compiled model expects them.

        Raises ValueError if some of the model were not given; it cannot be used then.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        assert self._inbox is not None, "the trainer calls init_transfer_engine first"
        self._inbox.finish()
        if not self._touched:  # nothing changed
            return
        finalize_layerwise_reload(self.model, self.model_config)
        # On CPU an output layer tied to the embedding keeps a packed copy of the old weights (log-probs were off by 0.5 nats).
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Leave the groups."""
        if self._inbox is not None:
            self._inbox.leave()


def own_waiting_tensors(model: torch.nn.Module) -> None:
    """Copy the tensors of a round that a module still holds, so that the memory of the round is free.

    vLLM's loader keeps the tensors of a module (q, k and v; gate and up) until it has all of them, and loads them then: of the
    others no copy is made. A tensor that was copied after an earlier round is not copied again.
    """
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    for module in model.modules():
        info = LAYERWISE_INFO.get(module)
        for _, call in info.loaded_weights if info is not None else ():
            for name, value in call.arguments.items():
                if isinstance(value, torch.Tensor) and value.device.type != "meta" and not hasattr(value, _OWN):
                    call.arguments[name] = value.clone()
                    setattr(call.arguments[name], _OWN, True)


def _forget_packed_experts(model: torch.nn.Module, kept: Set[str]) -> None:
    """Have the experts set up anew once they are loaded; those of layers that stay as they are keep their kernel.

    On CPU they are padded and packed when their kernel is built, which happens once: an update would leave plain weights where
    the kernel reads packed ones (log-probs were off by 1 nat), or fail on the padding.
    """
    layers = {match.group() for name in kept if (match := _LAYER.match(name))}
    for name, module in model.named_modules():
        match = _LAYER.match(name)
        stays = match is not None and match.group() in layers
        if not stays and getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None
