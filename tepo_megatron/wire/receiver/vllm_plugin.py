"""Weight-transfer backend of vLLM that takes the sources of `receiver.py`, on CPU and GPU. Runs inside the vLLM server.

vLLM finds `register` through the entry point `vllm.general_plugins`; `--weight-transfer-config '{"backend": "tepo_shm"}'`
selects it. Of this package it imports only `receiver.py`, `lifeline.py`, `dist/own_peers.py` and what these need: the
server loads nothing of the trainer. Facts are of vLLM 0.32.
"""

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform

from tepo_megatron.dist.own_peers import guard_process_groups
from tepo_megatron.wire.broadcast_group import GroupSpec, UnchangedTensors
from tepo_megatron.wire.receiver import lifeline
from tepo_megatron.wire.receiver.receiver import RankReceiver

BACKEND = "tepo_shm"
HYBRIDS = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")  # architectures with gated delta nets
HYBRID_MODULE = "tepo_megatron.wire.receiver.vllm_qwen3_5"  # imported only to serve one of them, on CPU
_OWN = "_tepo_own"  # attribute that marks copies made by `own_waiting_tensors`
_LAYER = re.compile(r"model\.layers\.\d+\.")


def register() -> None:
    """Register the backend, tie this process to the server's guard, and keep other users out of its process groups.

    On CPU vLLM also learns of our module for hybrids, which it imports if it serves one. On a GPU nothing of vLLM is replaced.

    vLLM calls this in each of its processes, in some of them twice.
    """
    lifeline.hold()
    guard_process_groups()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, TepoWeightTransferEngine.__name__)
    if current_platform.is_cpu():
        for architecture in HYBRIDS:
            ModelRegistry.register_model(architecture, f"{HYBRID_MODULE}:{architecture}")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Arguments of `init_transfer_engine`."""

    spec: dict[str, Any] | None = None
    unchanged: dict[str, Any] | None = None
    abandoned: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One round of an update.

    `sources`: sources of some of the model's tensors under their Hugging Face names. See `RankReceiver.take`.
    """

    sources: list[str]


class TepoWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Replace all weights, except unchanged ones, by those that are sent.

    vLLM calls `start_weight_update`, `update_weights` for each round, and `finish_weight_update`. After an error of the last
    two vLLM has to be restarted, unless the sender is gone: then the next update replaces all weights.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _receiver: RankReceiver | None = None
    _touched = False  # whether vLLM's loader is at work on the model
    _abandoned = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Set up the receiver.

        vLLM calls this at the start, for new groups to join, and for tensors that an update leaves unchanged.
        """
        self._receiver = self._receiver or RankReceiver()
        if init_info.spec is not None:
            self._receiver.join_groups(GroupSpec(**init_info.spec), self.device)
        if init_info.unchanged is not None:
            self._receiver.keep_unchanged(UnchangedTensors(**init_info.unchanged))
        self._abandoned = init_info.abandoned

    def start_weight_update(self) -> None:
        """Forget what an earlier update gave. The model is not touched before the first tensors can be loaded."""
        assert self._receiver is not None, "the trainer calls init_transfer_engine first"
        self._receiver.begin(self.model_config.model, self.model_config.hf_config.tie_word_embeddings, self.device)
        self._end_loading()  # of an update that failed
        self._abandoned = False

    def _end_loading(self) -> None:
        """Have vLLM put its own tensors back into the model, whose values are undefined if not all were loaded."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._touched:
            self._touched = False
            finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load one round, like the base class but without `torch.accelerator.synchronize()` on CPU, where it raises."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a round tensor by tensor, unless it did not arrive or was loaded already.

        A cast to the model's dtype is no error. Raises ValueError if the round holds a tensor that the model does not have,
        that has another shape, or that was given before in this update. The model is unchanged.
        """
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        assert self._receiver is not None, "the trainer calls init_transfer_engine first"
        if (arrived := self._receiver.take(update_info.sources)) is None:
            return
        if not self._touched:
            # Restore the checkpoint layout: on CPU the linear weights are packed and their originals freed.
            if self.device.type == "cpu":
                _forget_packed_experts(self.model, self._receiver.unchanged)
            initialize_layerwise_reload(self.model)
            self._touched = True
        # a module may wait for its other tensors, and the trainer overwrites its memory two rounds later
        if self._receiver.in_trainer_memory:
            arrived = ((name, tensor.clone()) for name, tensor in arrived)
        self.model.load_weights(arrived)
        if not self._receiver.in_trainer_memory:
            own_waiting_tensors(self.model)

    def finish_weight_update(self) -> None:
        """Pack the weights that vLLM packs, and copy all to where the compiled model expects them.

        Raises ValueError if tensors of the model were not given; the model is unusable then. After an update that was
        abandoned the model waits for the next one.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        assert self._receiver is not None, "the trainer calls init_transfer_engine first"
        if self._abandoned:
            self._receiver.leave()
            self._end_loading()
            return
        self._receiver.finish()
        if not self._touched:  # nothing changed
            return
        self._end_loading()
        # On CPU an output layer tied to the embedding keeps a packed copy of the old weights (log-probs were off by 0.5 nats).
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.leave()


def own_waiting_tensors(model: torch.nn.Module) -> None:
    """Copy the tensors of a round that vLLM's loader still holds, so that the memory of the round can be freed.

    The loader keeps the tensors of a fused module (q, k and v; gate and up) until it has all of them, and loads them then.
    Other tensors are not copied. A tensor that was copied after an earlier round is not copied again.
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
    """Have vLLM set up the experts again once they are loaded. Experts of unchanged layers keep their kernel.

    On CPU the experts are padded and packed when their kernel is built, which happens only once. Without this, an update would
    leave plain weights where the kernel reads packed ones (log-probs were off by 1 nat), or fail on the padding.
    """
    layers = {match.group() for name in kept if (match := _LAYER.match(name))}
    for name, module in model.named_modules():
        match = _LAYER.match(name)
        stays = match is not None and match.group() in layers
        if not stays and getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None
