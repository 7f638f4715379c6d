"""`tepo ablate`: chosen objectives with several seeds from one base model, compared with the noise shown."""

from tepo_megatron.ablation.runner import ablate

__all__ = ["ablate"]
