"""Check that the model can be split over the mesh. It needs no Megatron, and runs before any process is started."""

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import ParallelConfig, TrainingConfig
from tepo_megatron.models.ops import Architecture


def check_layout(arch: Architecture, parallel: ParallelConfig) -> None:
    """Raise ConfigError if the model cannot be split over the mesh. The message names the key, the size and valid values."""
    _check_tensor_parallel(arch, parallel)
    _check_linear_attention(arch, parallel)
    _check_pipeline(arch, parallel)
    if arch.experts is None and parallel.ep > 1:
        raise ConfigError(f"parallel.ep={parallel.ep}: the model has no experts; use 1")
    if arch.experts is not None and arch.experts.number % parallel.ep:
        raise ConfigError(
            f"parallel.ep={parallel.ep} does not divide the model's {arch.experts.number} experts; "
            f"use {_either(divisors(arch.experts.number))}"
        )


def stage_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """Return the number of transformer layers of each pipeline stage.

    If pp does not divide num_layers, the stages between the first and the last are equal (Megatron's rule), the largest stage
    is as small as that allows, and the last stage, which has the output layer, has at most as many layers as the first.
    """
    if num_layers % pp == 0:
        return (num_layers // pp,) * pp

    def stages(middle: int) -> tuple[int, ...]:
        """Return the layers of each stage if the stages in between have `middle` layers."""
        ends = num_layers - (pp - 2) * middle
        return (-(-ends // 2), *[middle] * (pp - 2), ends // 2)

    candidates = [s for middle in range(1, num_layers) if (s := stages(middle))[-1] >= 1]
    return min(candidates, key=lambda s: (max(s), -s[len(s) // 2]))


def _check_tensor_parallel(arch: Architecture, parallel: ParallelConfig) -> None:
    """Raise ConfigError if tp does not divide a size that it splits, or if experts lack sequence parallelism."""
    sizes = {"num_query_groups": arch.num_query_groups, "num_heads": arch.num_heads}
    if len(arch.sparse_layers) < arch.num_layers:
        sizes["ffn_size"] = arch.ffn_size
    if arch.experts is not None:
        sizes["the experts' ffn_size"] = arch.experts.ffn_size
    for name, size in sizes.items():
        if size % parallel.tp:
            fits = [n for n in divisors(arch.num_query_groups) if all(size % n == 0 for size in sizes.values())]
            raise ConfigError(f"parallel.tp={parallel.tp} does not divide {name}={size}; use {_either(fits)}")
    if arch.experts is not None and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.tp={parallel.tp} with experts needs parallel.sequence_parallel=true (Megatron trains them no other way)"
        )


def _check_linear_attention(arch: Architecture, parallel: ParallelConfig) -> None:
    """Raise ConfigError if the key heads of the gated delta rule cannot be split over tensor- and context-parallel ranks."""
    if (linear := arch.linear_attention) is None or linear.key_heads % (parallel.tp * parallel.cp) == 0:
        return
    fits = [n for n in divisors(linear.key_heads) if n % parallel.tp == 0]
    fix = f"a cp of {_either([n // parallel.tp for n in fits])}" if fits else f"a tp of {_either(divisors(linear.key_heads))}"
    raise ConfigError(
        f"parallel.tp * parallel.cp={parallel.tp * parallel.cp} does not divide the {linear.key_heads} key heads "
        f"(linear_num_key_heads) of the gated delta rule, whose heads are split over both; use {fix}"
    )


def check_shared_prompts(arch: Architecture, training: TrainingConfig) -> None:
    """Raise ConfigError if prompts must be shared in a model with the gated delta rule."""
    if arch.linear_attention is not None and training.share_prompts == "always":
        raise ConfigError(
            "training.share_prompts=always, but the model has layers with the gated delta rule, whose state after a prompt "
            "cannot be given to several responses here; use auto or never"
        )


def _check_pipeline(arch: Architecture, parallel: ParallelConfig) -> None:
    """Raise ConfigError if there are more stages than layers, or if virtual stages do not divide the layers."""
    stages = parallel.pp * parallel.vpp
    if parallel.vpp == 1 and stages > arch.num_layers:
        raise ConfigError(f"parallel.pp={stages} exceeds num_layers={arch.num_layers}; use at most {arch.num_layers}")
    if parallel.vpp > 1 and arch.num_layers % stages:
        raise ConfigError(
            f"parallel.pp * parallel.vpp={stages} does not divide num_layers={arch.num_layers}; "
            f"use {_either(divisors(arch.num_layers))}, or vpp=1"
        )


def divisors(n: int) -> list[int]:
    """Return all divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _either(values: list[int]) -> str:
    *head, last = [str(v) for v in values]
    return f"{', '.join(head)} or {last}" if head else last
