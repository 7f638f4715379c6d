"""`tepo ablate`: train several objectives with several seeds from one base model, and compare them with their noise."""

from tepo_megatron.ablation.runner import ablate

__all__ = ["ablate"]
