"""A weight-transfer backend of vLLM that reads safetensors files, on CPU and GPU. Runs inside the vLLM server.

vLLM finds `register` through the entry point `vllm.general_plugins`; `--weight-transfer-config '{"backend": "tepo_shm"}'`
selects it. Of this package it imports `weight_files.py` alone: the server loads nothing of the trainer. Facts are of vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from tepo_megatron.rollout.weight_files import check_tensors, tensors

BACKEND = "tepo_shm"


def register() -> None:
    """Make the backend known; vLLM calls this in each of its processes, in some of them twice."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, SafetensorsEngine.__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: files need no rendezvous."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """paths: safetensors files that hold the whole model between them, each tensor once, under its Hugging Face name."""

    paths: list[str]


class SafetensorsEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Replaces all weights by those of some files: `start_weight_update`, one `update_weights`, `finish_weight_update`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing: the model is touched only once the files are known to be complete."""

    def update_weights(self, update_info: dict[str, object]) -> None:
        """The base class without its `torch.accelerator.synchronize()`, which raises where there is no accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the files, a tensor at a time.

        Raises ValueError, with the model as it was, unless the files hold exactly the tensors of the model's checkpoint, in
        their shapes (a cast to the model's dtype is no fault).
        """
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        check_tensors(update_info.paths, self.model_config.model, self.model_config.hf_config.tie_word_embeddings)
        # Back to the layout of a checkpoint: on CPU the linear weights are packed, and their originals freed.
        initialize_layerwise_reload(self.model)
        self.model.load_weights(tensors(update_info.paths))

    def finish_weight_update(self) -> None:
        """Pack what is packed and put the weights where the compiled model expects them."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        # On CPU an output layer tied to the embedding keeps a packed copy of the old weights (log-probs were off by 0.5 nats).
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Nothing to release."""
