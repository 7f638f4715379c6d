"""The config defaults that differ between `platform: cpu` and `platform: cuda`, in one table.

A key in this table is `null` or `auto` in the config until somebody sets it; `default_of` gives the value of the platform then.
Nothing else in the package may choose a value of a config key by the platform: `tests/unit/config/test_platform_defaults.py`
reads the source and fails. The recipe gate (`tests/gate/`) trains every shipped YAML on a CPU with the `cuda` column forced on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class PlatformDefault:
    """The value that a key takes on each platform when the config leaves it at null, and the reason for the difference."""

    cpu: Any
    cuda: Any
    why: str


PLATFORM_DEFAULTS: Mapping[str, PlatformDefault] = {
    "megatron.ddp.overlap_grad_reduce": PlatformDefault(False, True, "gloo has no stream that runs next to the backward pass"),
    "megatron.ddp.overlap_param_gather": PlatformDefault(False, True, "gloo has no stream that runs next to the forward pass"),
    "training.share_prompts": PlatformDefault(
        "where it saves", "never", "Transformer Engine's packed attention cannot share keys; on GPUs it is not measured"
    ),
    "megatron.transformer.gradient_accumulation_fusion": PlatformDefault(
        False, True, "saves a GPU one write and two reads of every weight gradient; published CPU runs were made without"
    ),
}


def default_of(key: str, platform: str, value: T | None) -> T:
    """Return `value`, or the platform's default where `value` is None."""
    return getattr(PLATFORM_DEFAULTS[key], platform) if value is None else value


JOIN_SECONDS = PlatformDefault(30.0, 300.0, "the first start of NCCL over InfiniBand can take minutes")


def join_seconds(platform: str) -> float:
    """Return the seconds in which ranks and servers must have formed the groups of `sync.transport=group`, in one attempt.

    The groups are formed at the first delivery and again whenever a server comes back, and connect in a broadcast of one byte.
    """
    return getattr(JOIN_SECONDS, platform)


# Every other place of the package that asks for the platform (file below tepo_megatron/, function), and what differs there.
PLATFORM_BRANCHES: Mapping[str, str] = {
    "plan/advice.py:advice_lines": "ranks on a CPU share its cores",
    "actor/activations.py:HostActivations._away": "a GPU copies on a stream of its own, to page-locked memory",
    "actor/attention_layout.py:repeats_keys": "CUDA's attention in fp32 knows no grouped heads",
    "ops/flash_attention.py:packed_flash_of": "flash attention of packed sequences runs on a GPU only",
    "actor/build.py:own_fields": "Megatron initializes parameters on the host",
    "actor/kernels.py:choose": "Transformer Engine and Apex run on a GPU only",
    "actor/kernels.py:choose_linear": "flash-linear-attention and causal-conv1d run on a GPU only",
    "actor/kernels.py:_gradient_accumulation": "Apex's extension runs on a GPU only",
    "actor/kernels.py:hardware": "a CPU has no compute capability",
    "actor/pass_spans.py:DeviceSpans.__init__": "CUDA events tell when kernels ran",
    "controller/tracing.py:_profiler": "torch's profiler records GPUs, too",
    "actor/offload.py:Offloader.__init__": "what leaves the device: the gate has a CPU do as a GPU does",
    "weight_sync/broadcast_group.py:BroadcastGroup._form": "a thread that forms a group works on this rank's GPU",
    "weight_sync/broadcast_group.py:BroadcastGroup.close": "work on a GPU is waited for before NCCL's group goes",
    "weight_sync/broadcast_group.py:form_group": "NCCL needs to know its device",
    "checkpoint/rng_state.py:capture": "a GPU has random generators of its own",
    "checkpoint/rng_state.py:restore": "likewise",
    "checkpoint/saving.py:SavingThread.__init__": "copies from a GPU have a stream of their own",
    "checkpoint/tensors.py:HostCopy.take": "a copy from a GPU is waited for",
    "checkpoint/tensors.py:HostCopy._make_places": "page-locked memory for copies from a GPU",
    "config/megatron.py:check_platform": "refuses what only a GPU has",
    "config/model.py:check_attention": "likewise",
    "config/sync.py:_check_group": "NCCL has no group of two processes on one GPU",
    "config/sync.py:check_quantize": "engines compute blockwise FP8 on GPUs",
    "doctor/machine.py:enough_devices": "counts GPUs",
    "doctor/machine.py:processors": "asks for the driver, or for cores",
    "doctor/versions.py:kernels": "advice about Transformer Engine",
    "doctor/versions.py:linear_kernels": "advice about the packages of linear attention",
    "doctor/versions.py:cudnn": "a CPU loads no cuDNN",
    "weight_sync/ipc.py:export_buffer": "CUDA IPC, or an unnamed file in memory",
    "weight_sync/ipc.py:open_buffer": "likewise",
    "weight_sync/ipc.py:_open_device_buffer": "likewise",
    "launcher/launcher.py:_environment": "threads of a rank",
    "rollout/judges.py:_check_machine": "counts GPUs",
    "launcher/launcher.py:launch": "tries GPUs after a failure, and no CPU is ever lost",
    "launcher/restart_request.py:changed": "servers have the GPUs behind those of the ranks",
    "ops/flash_attention.py:(module)": "PyTorch's kernels of each device: parity in tests/unit/ops and tests/gpu",
    "ops/output_layer.py:add_product": "tensor cores add bf16 products in fp32: parity in tests/unit/ops and tests/gpu",
    "ops/token_statistics/__init__.py:row_kernels": "Triton, or PyTorch: parity in Triton's interpreter and in tests/gpu",
    "ops/token_statistics/pytorch.py:_chunks": "size of a chunk",
    "distributed/parallel.py:initialize": "the rank's GPU is made current",
    "plan/memory.py:host_bytes": "the page-locked memory of `weight_sync/stores.py:Staging`",
    "plan/command.py:predictor_of": "kernels that the plan assumes",
    "report/panels.py:has_limits": "which limits the report draws",
    "inference/engines.py:first_server_device": "GPUs that the ranks leave to the servers",
    "inference/linear_attention.py:check_linear_attention": "SGLang's CPU build lacks operators",
    "rollout/experts.py:replayed_routing": "vLLM returns no experts on a CPU",
    "weight_sync/receiver/vllm_plugin.py:TepoWeightTransferEngine.update_weights": "vLLM reloads layer by layer on GPUs",
    "weight_sync/receiver/vllm_plugin.py:TepoWeightTransferEngine.receive_weights": "likewise",
    "inference/sglang.py:SglangApi.command": "options of the server",
    "inference/sglang.py:SglangApi.environment": "its environment",
    "inference/torch_engine.py:(module)": "memory of the KV cache",
    "inference/torch_engine.py:TorchApi.environment": "its environment",
    "inference/vllm.py:VllmApi.command": "options of the server",
    "inference/vllm.py:VllmApi.environment": "its environment",
    "config/safety.py:_checksums": "vLLM on a CPU packs linear layers, of which it tells no checksum",
    "weight_sync/stores.py:FileTransport.__init__": "files of weights leave a GPU through page-locked memory",
    "weight_sync/stores.py:PinnedStaging.copy": "copies from a GPU are waited for",
}
