"""Evaluation: accuracies on held-out problems and benchmarks, with their standard errors."""

from tepo_megatron.evaluation.held_out import EVALUATION_FILE, Accuracy, Scores, evaluate, read_evaluation, write_evaluation

__all__ = ["EVALUATION_FILE", "Accuracy", "Scores", "evaluate", "read_evaluation", "write_evaluation"]
