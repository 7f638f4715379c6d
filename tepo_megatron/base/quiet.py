"""Suppress warnings of other packages that do not matter to the user of a run, each with its reason."""

import warnings


def quiet_upstream() -> None:
    """Silence these warnings in this process."""
    for category, message in (
        # Megatron-Core calls collectives by names that torch 2.13 deprecated
        (FutureWarning, r"`torch\.distributed\.\w+` is deprecated"),
        # Megatron-Core reads .grad of the distributed optimizer's shards, which are views
        (UserWarning, r"The \.grad attribute of a Tensor that is not a leaf"),
        # Megatron-Core warns of its own default for CUDA graphs, which are off
        (UserWarning, r"full scope is deprecated"),
        # Megatron-Core compares the CPU and CUDA generator states, which are the same on the CPU
        (UserWarning, r"CPU RNG state changed within GPU RNG context"),
        # matplotlib draws a box for a letter of the run's name that its font lacks
        (UserWarning, r"Glyph \d+ .* missing from font"),
    ):
        warnings.filterwarnings("ignore", message=message, category=category)
