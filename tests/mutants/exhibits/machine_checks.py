"""Checks of a machine with a GPU that say nothing, or the wrong thing, in their only chance."""

from tests.mutants.exhibit import Exhibit

COMMAND = "tests/unit/benches/test_gpu_check_command.py"
REHEARSAL = "own: the GPU check, rehearsed without a network on a machine whose name nothing resolves"

KIND = "checks of a machine"
EXHIBITS = (
    Exhibit(
        name="ranks_meet_by_the_name_of_the_machine",
        source=REHEARSAL,
        bug="Ranks on one machine get its name for their rendezvous, as a standalone torchrun does. Most machines resolve it.",
        cost="On a bare machine three of nine parts had no result: ranks look the name up until they are cut off.",
        symbol="world",
        old='"MASTER_ADDR": "127.0.0.1"',
        new='"MASTER_ADDR": os.uname().nodename',
        tests=("tests/unit/benches/test_ranks.py::test_ranks_meet_where_this_machines_name_does_not_resolve",),
    ),
    Exhibit(
        name="limits_do_not_shrink_with_the_minutes",
        source=REHEARSAL,
        bug="A shorter check keeps the time limits of ten minutes. It ends in time, since what is left is a limit, too.",
        cost="The first tasks that hang take all of the time, and the most wanted figures have no time left.",
        symbol="limit",
        old="minutes / 10 * sum",
        new="max(1.0, minutes / 10) * sum",
        tests=(f"{COMMAND}::test_limits_follow_the_minutes",),
    ),
    Exhibit(
        name="rows_are_written_when_a_task_has_ended",
        source=REHEARSAL,
        bug="The table is written at the end of each task, so that a killed check loses the rows of the task that ran.",
        cost="A machine that is taken back in mid-task gives nothing for its last minute.",
        symbol="TaskProcess._ended",
        old='keep(TaskResult(self._task, "running"',
        new='str(TaskResult(self._task, "running"',
        tests=(f"{COMMAND}::test_a_killed_check_leaves_a_table_with_every_row_that_was_known[3]",),
    ),
    Exhibit(
        name="no_gpu_is_a_success",
        source=REHEARSAL,
        bug="Where torch finds no GPU all parts are skipped, and skipping is no failure.",
        cost="A driver that does not start reads as a check that passed.",
        symbol="main",
        old="        return 1\n    table.write()\n",
        new="        return 0\n    table.write()\n",
        tests=(f"{COMMAND}::test_missing_wheels_are_said_before_torch_is_imported", f"{COMMAND}::test_no_gpu_is_no_success"),
    ),
    Exhibit(
        name="an_unknown_gpu_is_an_h100",
        source=REHEARSAL,
        bug="A GPU that the plan's table does not have gets the first name that its own contains, or H100.",
        cost="The step of an A100 or a GH200 is compared with the prediction for another board.",
        symbol="card_of",
        old="None if words & NOT_SXM else next((name for name in GPUS if name in words), None)",
        new='next((name for name in GPUS if name in device), "H100")',
        tests=(f"{COMMAND}::test_a_gpu_has_the_limits_of_its_own_card",),
    ),
    Exhibit(
        name="the_plan_is_that_of_another_attention",
        source=REHEARSAL,
        bug="`tepo plan` takes `attention=auto` for Transformer Engine's; the step is measured where that is not installed.",
        cost="2.7 of 54 GiB are missing in the prediction for 1.7 B parameters, and the comparison blames the plan.",
        symbol="attention_words",
        old='if layers == "torch" else []',
        new='if layers == "none" else []',
        tests=("tests/unit/benches/test_gpu_check.py::test_the_plan_takes_the_attention_that_is_here",),
    ),
    Exhibit(
        name="positions_beyond_the_models",
        source="open-r1 #382, simpleRL-reason #58",
        bug="Conversations and prompts with responses may be longer than max_position_embeddings.",
        cost="tepo sft trains positions that the model never saw, without a word.",
        symbol="check_positions",
        old="if length > limit:",
        new="if False:",
        tests=("tests/unit/test_doctor.py::test_longer_contexts_than_the_model_or_its_cache_holds_are_refused",),
    ),
)
