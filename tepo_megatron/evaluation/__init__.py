"""Accuracy with its error."""

from tepo_megatron.evaluation.runner import Accuracy, evaluate

__all__ = ["Accuracy", "evaluate"]
