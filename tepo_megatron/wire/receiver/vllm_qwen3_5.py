"""vLLM's Qwen3.5 on CPU, as a plugin has to offer it. vLLM imports this module instead of its own once it serves such a model.

Facts are of vLLM 0.32 and transformers 5.19. The module changes the server's process in three ways before it offers vLLM's own
classes: the import of vLLM's file works without torchvision, the gated delta nets are those of `vllm_gated_delta.py`, and a
prompt with a seed can be prefilled in chunks. Nothing here is used on a GPU.
"""

import functools
import importlib
import importlib.util
import sys
from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def import_without_torchvision() -> None:
    """Let vLLM's file find `smart_resize`, which it takes from a module of transformers that needs torchvision.

    There is no CPU build of torchvision for each torch, and a text model needs none. The same function is in a module that
    needs Pillow only.
    """
    package = "transformers.models.qwen2_vl"
    if importlib.util.find_spec("torchvision") is None:
        without = importlib.import_module(f"{package}.image_processing_pil_qwen2_vl")
        sys.modules.setdefault(f"{package}.image_processing_qwen2_vl", without)


def keep_generators_of_unfinished_prompts() -> None:
    """Have a prompt that is prefilled in several steps leave its generator alone until the last of them.

    vLLM samples after each step and discards the token. It then rewinds the generator, which only CUDA's can: on CPU the engine
    ends with "CPU Generator does not use offset". Here such a prompt has no generator in these steps.
    """
    upstream = CPUModelRunner.sample_tokens

    @functools.wraps(upstream)
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, count = self.input_batch.generators, self.input_batch.num_reqs
        unfinished = self.discard_request_mask.np[:count].nonzero()[0].tolist()
        waiting = {i: generators.pop(i) for i in unfinished if i in generators}
        try:
            return upstream(self, *args, **kwargs)
        finally:
            generators.update(waiting)

    CPUModelRunner.sample_tokens = sample_tokens


import_without_torchvision()
keep_generators_of_unfinished_prompts()
importlib.import_module("tepo_megatron.wire.receiver.vllm_gated_delta")
_upstream = importlib.import_module("vllm.model_executor.models.qwen3_5")
Qwen3_5ForCausalLM = _upstream.Qwen3_5ForCausalLM
Qwen3_5ForConditionalGeneration = _upstream.Qwen3_5ForConditionalGeneration
