"""A weight-transfer backend of vLLM that reads safetensors files, on CPU and GPU. Runs inside the vLLM server.

vLLM finds `register` through the entry point `vllm.general_plugins`; `--weight-transfer-config '{"backend": "tepo_shm"}'`
selects it. Imports nothing of this package, so that the server loads nothing of the trainer. Facts about vLLM are of 0.32.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "tepo_shm"
# The output layer's name in every Hugging Face causal language model; with tied embeddings it may be there or not.
OUTPUT_LAYER = "lm_head.weight"


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

        self._check_tensors(update_info.paths)
        # Back to the layout of a checkpoint: on CPU the linear weights are packed, and their originals freed.
        initialize_layerwise_reload(self.model)
        self.model.load_weights(_tensors(update_info.paths))

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

    def _check_tensors(self, paths: list[str]) -> None:
        """vLLM's loaders leave a missing weight as it was, drop an unknown bias and cut a tensor too large, without a word."""
        checkpoint = sorted(Path(self.model_config.model).glob("*.safetensors"))
        expected = {name: shape for path in checkpoint for name, shape in _shapes(path).items()}
        given = [item for path in paths for item in _shapes(path).items()]
        names = Counter(name for name, _ in given)
        optional = {OUTPUT_LAYER} if self.model_config.hf_config.tie_word_embeddings else set()
        faults = {
            "given twice": {name for name, count in names.items() if count > 1},
            "unknown": names.keys() - expected.keys() - optional,
            "missing": expected.keys() - names.keys() - optional,
            "of another shape": {name for name, shape in given if shape != expected.get(name, shape)},
        }
        found = [f"{len(them)} {fault}: {', '.join(sorted(them)[:5])}" for fault, them in faults.items() if them]
        if found:
            raise ValueError(f"the files do not hold the tensors of the model ({'; '.join(found)})")


def _shapes(path: str | Path) -> dict[str, list[int]]:
    """name -> shape of the tensors in a safetensors file, from its header: 8 bytes of length, then JSON."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}


def _tensors(paths: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the host) of each file in turn; a file is mapped, not read, and only while its tensors are in use."""
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)
