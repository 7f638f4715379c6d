"""Grades and evaluations of something else."""

from __future__ import annotations

from tests.mutants.exhibit import Exhibit

EXHIBITS = (
    Exhibit(
        name="a_timeout_is_a_wrong_answer",
        source="verl #5635",
        kind="grading",
        bug=(
            "The alarm of a symbolic grader was swallowed (there, because it ran outside of the main thread), and "
            "every answer that needed the grader scored 0. Rewards fall to a floor that looks like a hard "
            "dataset."
        ),
        cost=(
            "math-verify and SymPy catch the alarm themselves and go on, or call the answer unequal: `wrong`, "
            "which is remembered, instead of `timeout`, which is not."
        ),
        symbol="OutOfTimeError",
        old="class OutOfTimeError(BaseException):",
        new="class OutOfTimeError(Exception):",
        tests=("tests/unit/rewards/test_grading_pool.py::test_the_soft_alarm_gets_through_libraries_that_swallow_exceptions",),
    ),
    Exhibit(
        name="evaluated_at_the_temperature_of_training",
        source="own (CHANGELOG Added: evaluation); no document names it",
        kind="grading",
        bug="Held-out problems are sampled as the config of evaluations says, and the line in the log says so.",
        cost="Accuracies are of rollout.temperature, and the log names evaluation.temperature.",
        symbol="Evaluations.measure",
        old="asked = replace(sampling, samples=cfg.samples, temperature=cfg.temperature, routing=None)",
        new="asked = replace(sampling, samples=cfg.samples, routing=None)",
        tests=("tests/unit/evaluation/test_evaluation.py::test_an_evaluation_samples_as_its_own_settings_say",),
    ),
    Exhibit(
        name="tools_answers_are_graded",
        source="own (custom functions); the grader's side of Search-R1 #21",
        kind="grading",
        bug=("A tool's output lies between the model's turns. If the grader reads it, a tool's box is the model's answer."),
        cost="Everything after the prompt is graded. Without tools it is the same.",
        symbol="Response.written",
        old="return self._field(self._rollout.token_ids_L.numpy()[self._rollout.response_mask_L.numpy()])",
        new="return self._field(self._rollout.token_ids_L.numpy()[int(self._rollout.response_mask_L.int().argmax()) :])",
        tests=("tests/unit/rewards/test_reward_terms.py::test_what_tools_wrote_is_neither_graded_nor_the_prompt",),
    ),
)
