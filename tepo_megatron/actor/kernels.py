"""Choice of implementations: Transformer Engine's, else Apex's, else PyTorch's. No other module makes this choice.

Megatron itself takes FusedAdam from Transformer Engine, else from Apex, else AdamW from PyTorch. With sequence parallelism it
supports only Transformer Engine's norms, and it does not use Apex's RMS norm.
"""

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch
from packaging.version import Version

from tepo_megatron.actor.precision import Hardware
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import MegatronConfig, ModelConfig

_MODULES = (
    "transformer_engine", "apex", "amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda", "fla", "causal_conv1d",
)  # fmt: skip
_NAMES = {
    "te": "Transformer Engine", "apex": "Apex", "torch": "PyTorch", "host": "this package", "separate": "autograd",
    "fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d",
}  # fmt: skip


@dataclass(frozen=True)
class KernelChoice:
    """The package that implements each kind of kernel.

    `gradient_accumulation`: the product that adds a weight's gradient directly to the fp32 sum, in Megatron's own linear layers
    (Transformer Engine's do that themselves). "separate": autograd adds the gradient afterwards.
    """

    layers: Literal["te", "torch"]
    norms: Literal["te", "apex", "torch"]
    adam: Literal["te", "apex", "torch", "host"]
    gradient_accumulation: Literal["apex", "torch", "separate"]

    def __str__(self) -> str:
        return (
            f"layers and attention: {_NAMES[self.layers]}; norms: {_NAMES[self.norms]}; Adam: {_NAMES[self.adam]}; gradient "
            f"accumulation: {_NAMES[self.gradient_accumulation]}"
        )


@dataclass(frozen=True)
class LinearChoice:
    """The package that implements each kernel of linear attention."""

    delta_rule: Literal["fla", "torch"]
    convolution: Literal["causal_conv1d", "torch"]

    def __str__(self) -> str:
        return f"gated delta rule: {_NAMES[self.delta_rule]}; causal convolution: {_NAMES[self.convolution]}"


def choose_linear(model: ModelConfig, device_type: str, packages: frozenset[str]) -> LinearChoice:
    """Return the implementations of linear attention. The packages' kernels multiply in 16 bits, so fp32 models use PyTorch."""
    half = device_type == "cuda" and model.dtype == "bf16"
    return LinearChoice(
        "fla" if half and "fla" in packages else "torch", "causal_conv1d" if half and "causal_conv1d" in packages else "torch"
    )


def installed() -> frozenset[str]:
    """Return which of the optional packages are installed: Transformer Engine, Apex and its extensions, the kernels of linear
    attention. Nothing is imported.
    """
    return frozenset(name for name in _MODULES if importlib.util.find_spec(name) is not None)


def choose(
    model: ModelConfig,
    megatron: MegatronConfig,
    device_type: str,
    packages: frozenset[str],
    *,
    cp: int = 1,
    offload_activations: bool = False,
) -> KernelChoice:
    """Return the implementations that this config runs with.

    `cp`: Context-parallel ranks. Transformer Engine 2.20 has no attention in fp32 for more than one: its flash and cuDNN
    kernels take 16 bits and less, its unfused form takes no context parallelism. `auto` then takes PyTorch's layers. Raises
    ConfigError if the config needs a package that is not installed, or Apex lacks its CUDA extensions.
    """
    fused = megatron.fuses_gradient_accumulation("cuda" if device_type == "cuda" else "cpu", offload_activations)
    if device_type != "cuda":  # a CPU, or "meta", on which tools/convert.py builds models
        return KernelChoice("torch", "torch", "host", _gradient_accumulation(fused, "cpu", packages))
    if (model.attention == "te" or model.fp8) and "transformer_engine" not in packages:
        key, other = (f"model.precision={model.precision}", "bf16") if model.fp8 else ("model.attention=te", "auto")
        raise ConfigError(f"{key}, but transformer-engine is not installed; install the extra `te` or use {other}")
    has_te, has_apex = "transformer_engine" in packages, "apex" in packages
    adam: Literal["te", "apex", "torch"] = "te" if has_te else "apex" if has_apex else "torch"
    if adam == "apex" and "amp_C" not in packages:
        raise ConfigError(
            "Apex is installed without its CUDA extensions, and Megatron would take its FusedAdam, which needs them; build it "
            "with APEX_CPP_EXT=1 APEX_CUDA_EXT=1 as the Dockerfile does, or remove it"
        )
    wanted = model.attention == "te" or (model.attention == "auto" and not (model.precision == "fp32" and cp > 1))
    layers: Literal["te", "torch"] = "te" if has_te and wanted else "torch"
    plain: Literal["apex", "torch"] = "apex" if {"apex", "fused_layer_norm_cuda"} <= packages else "torch"
    return KernelChoice(layers, "te" if layers == "te" else plain, adam, _gradient_accumulation(fused, device_type, packages))


def _gradient_accumulation(fused: bool, device_type: str, packages: frozenset[str]) -> Literal["apex", "torch", "separate"]:
    if not fused:
        return "separate"
    return "apex" if device_type == "cuda" and "fused_weight_gradient_mlp_cuda" in packages else "torch"


def check_transformer_engine(megatron: MegatronConfig, packages: frozenset[str]) -> None:
    """Raise ConfigError if the config needs Transformer Engine for the optimizer or for overlap, and it is not installed."""
    if "transformer_engine" in packages:
        return
    moments, share = megatron.known_optimizer.small_moments, megatron.offloaded_share
    for key, asked, instead in (
        (f"megatron.optimizer.{moments}", moments, "fp32"),
        (f"megatron.optimizer.optimizer_offload_fraction={share:g}", share > 0, "0"),
        ("megatron.transformer.tp_comm_overlap=true", megatron.tp_comm_overlap, "false"),
    ):
        if asked:
            raise ConfigError(f"{key}, but transformer-engine is not installed; install the extra `te` or use {instead}")


def hardware(device: torch.device) -> Hardware:
    """Return a description of this rank's device and of its software."""
    if device.type != "cuda":
        return Hardware("a CPU", None)
    cuda = Version(torch.version.cuda) if torch.version.cuda else None
    engine = Version(importlib.metadata.version("transformer-engine")) if "transformer_engine" in installed() else None
    versions = ((version.major, version.minor) if version else None for version in (engine, cuda))
    return Hardware(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), *versions)
