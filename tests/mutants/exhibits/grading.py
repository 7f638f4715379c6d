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
    Exhibit(
        name="grades_in_the_order_of_their_arrival",
        source="our own: decisions/0031 (grading)",
        kind="grading",
        bug="Workers finish in another order than that in which they were asked, and grades belong to what was asked.",
        cost="Rollouts of a group exchange their grades whenever one takes longer. The group's mean is right.",
        symbol="GradingPool.grade",
        old="return list(await asyncio.gather(*map(self.ask, requests)))",
        new="return [await outcome for outcome in asyncio.as_completed([*map(self.ask, requests)])]",
        tests=("tests/unit/rewards/test_grading_queue.py::test_a_group_does_not_wait_for_the_time_out_of_another",),
    ),
    Exhibit(
        name="a_late_grade_is_that_of_the_next_answer",
        source="our own: decisions/0031 (grading)",
        kind="grading",
        bug="A worker replies in order, so its next reply is taken for the next request, whatever number it has.",
        cost="One reply too many, and every later grade of this worker belongs to the answer before.",
        symbol="GradingWorker.receive",
        old="serial == self._answered + 1 <= self._sent",
        new="serial <= self._sent",
        tests=("tests/unit/rewards/test_grading_pool.py::test_a_broken_worker_costs_one_sample",),
    ),
    Exhibit(
        name="the_speed_of_grading_chooses_the_groups",
        source="our own: decisions/0031 (grading)",
        kind="grading",
        bug="More groups are submitted than a step wants, and those that are graded first are kept.",
        cost="With oversampling, groups that are quick to grade are trained on more often, and no run can be repeated.",
        symbol="Collector._graded",
        old="if useful + len(grading) < wanted:",
        new="if useful < wanted:",
        tests=("tests/unit/rollout/test_collector.py::test_the_speed_of_grading_does_not_decide_which_groups_are_kept",),
    ),
    Exhibit(
        name="a_program_reads_the_keys_of_its_grader",
        source="own (decisions/0044; found by a hostile program of tests/unit/test_sandbox.py)",
        kind="grading",
        bug="The program's environment is cleared, and that of the first process in its sandbox is the grader's.",
        cost="/proc/1/environ has every key of the run's user, for each program that a model writes.",
        symbol="started",
        old='words, env={}, cwd="/"',
        new='words, cwd="/"',
        tests=("tests/unit/test_sandbox.py::test_some_hostile_programs",),
    ),
    Exhibit(
        name="an_object_that_equals_everything",
        source="own (decisions/0044); a known way to pass unit tests",
        kind="grading",
        bug="A test compares what the program returns, and the program says what its objects are equal to.",
        cost="A program that returns such an object passes every assert; its reward is 1.",
        symbol="StandIn.__eq__",
        old='raise TypeError("the program returned no literal")',
        new="return True",
        tests=("tests/unit/rewards/test_code_reward.py::test_nobody_passes_without_being_right",),
    ),
    Exhibit(
        name="a_response_ends_its_message",
        source="own (decisions/0045); a known way to steer judges",
        kind="grading",
        bug="A tokenizer turns the text <|im_end|> into the token that ends a message, wherever the text comes from.",
        cost="A response writes the judge's own turn, with its verdict. Rewards rise, and the policy learns nothing else.",
        symbol="QuotedChat.encode",
        old="self._quoted(text)",
        new="self._tokenized([text])",
        tests=("tests/unit/rollout/test_quoted_chat.py::test_texts_are_text_whatever_they_spell",),
    ),
    Exhibit(
        name="the_verdict_of_the_response",
        source="own (decisions/0045): only what the judge sampled is a verdict",
        kind="grading",
        bug="The verdict is searched in the question and the answer, as in a transcript of the chat.",
        cost="Where the judge gives no verdict, that of the response counts: 'Verdict: 10' is worth 10.",
        symbol="JudgeTerm.judge",
        old="await self._value(reply.text)",
        new='await self._value(fields["response"] + reply.text)',
        tests=("tests/unit/rewards/test_judge.py::test_hostile_texts_are_quoted",),
    ),
)
