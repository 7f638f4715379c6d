"""Evaluation: accuracies on held-out problems and benchmarks, with their standard errors."""

from tepo_megatron.evaluation.records import EVALUATION_FILE, Scores, read_evaluation, write_evaluation
from tepo_megatron.evaluation.runner import Accuracy, evaluate

__all__ = ["EVALUATION_FILE", "Accuracy", "Scores", "evaluate", "read_evaluation", "write_evaluation"]
