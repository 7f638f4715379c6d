"""Runs that go on from another place than where they ended."""

from tests.mutants.exhibit import Exhibit

KIND = "resume"
EXHIBITS = (
    Exhibit(
        name="the_cursor_is_ahead_of_training",
        source="NeMo-RL #3599",
        bug=(
            "A checkpoint of an asynchronous run held the place up to which prompts had been SAMPLED, not "
            "trained: a resume skipped what had been under way, 675 of 736 groups, about 30 % of an epoch and the "
            "long ones above all. The run went on without a word."
        ),
        cost=(
            "With max_staleness >= 1 the prompts of steps that are sampled but not trained are lost on resume. "
            "With 0 both are the same. (The position is also read while another thread moves it.)"
        ),
        symbol="MainDriver.state",
        old='"prompts": self.kept.position(step),',
        new='"prompts": self._source.position() if self._prompts is not None else None,',
        tests=("tests/parallel/test_resume.py::test_prompts_that_were_sampled_ahead_of_a_kill_are_not_lost",),
    ),
    Exhibit(
        name="the_epoch_begins_again_on_resume",
        source="prime-rl #3332",
        bug=(
            "A resumed run began its data at row 0 again and never moved the saved place. Found by chance on a "
            "run of 500 steps: the curve only looks a little better, since the prompts are known."
        ),
        cost="After a resume the current epoch's first prompts come again and its last ones come later.",
        symbol="PromptStream.load_state_dict",
        old="walk.enter(epoch, position)",
        new="walk.enter(epoch, 0)",
        tests=("tests/unit/data/test_prompt_stream.py::test_stream_resumes_exactly",),
    ),
    Exhibit(
        name="a_place_in_another_dataset",
        source="NeMo-RL #2519",
        bug=("On resume the place of one dataset was applied to another. It is a number in range, so nothing complains."),
        cost="A resume with edited data of the same length goes on in the middle of it.",
        symbol="PromptStream.load_state_dict",
        old=('            ("fingerprint", "resume with the same data.train, keys and tokenizer"),\n'),
        new="",
        tests=("tests/unit/data/test_prompt_stream.py::test_stream_refuses_the_state_of_another",),
    ),
    Exhibit(
        name="the_schedule_steps_twice_on_resume",
        source="miles #1627",
        bug=(
            "The learning-rate scheduler took its step once on loading and once in the loop. After every resume "
            "the rate is one step ahead; with frequent restarts a warm-up or decay is much shorter than "
            "configured."
        ),
        cost="A run that is resumed in its warm-up has a higher rate than one that was not killed.",
        symbol="restore",
        old='actor.scheduler.step(increment=checkpoint.numbers["scheduler_steps"])',
        new='actor.scheduler.step(increment=checkpoint.numbers["scheduler_steps"] + 1)',
        tests=(
            "tests/parallel/test_checkpoint.py::test_on_the_same_layout_it_goes_on_bit_for_bit",
            "tests/parallel/test_resume.py::test_a_run_killed_several_times_ends_like_an_undisturbed_one",
        ),
    ),
    Exhibit(
        name="the_earlier_of_two_records_stays",
        source="reliability_audit.md 5, CHANGELOG Fixed (rewound by step)",
        bug=(
            "Metrics were rewound by byte offset: a file cut in mid-line glued two records, a missing line "
            "doubled a step. Here its heir: of two records of a step that of the attempt which was undone stays."
        ),
        cost="Metrics and reports show the course that the run did not take.",
        symbol="steps_of",
        old="        kind[step] = line",
        new="        kind.setdefault(step, line)",
        tests=("tests/unit/test_damaged_records.py::test_of_two_records_of_a_step_the_later_attempts_stays",),
    ),
    Exhibit(
        name="a_recording_of_the_former_course",
        source="reliability_audit.md 5 and 8 (what a kill undid)",
        bug=(
            "After a resume the recording of a step that is taken again stayed next to new ones, so a replay mixes two courses."
        ),
        cost=(
            "The recording of the first step that is taken again is not set aside; if the run ends before it gets "
            "there again, a replay uses it."
        ),
        symbol="set_aside",
        old="if step > after]",
        new="if step > after + 1]",
        tests=("tests/unit/rollout/test_replay.py::test_recordings_of_steps_that_are_taken_again_are_set_aside",),
    ),
    Exhibit(
        name="a_replaced_folder_is_written_into",
        source="reliability_audit.md 7, CHANGELOG Fixed",
        bug="A live run whose folder was removed wrote its metrics into its successor's folder.",
        cost="Only a folder that is gone is noticed, not one that another run made.",
        symbol="RunLog.check_in_place",
        old="if os.path.samestat(os.fstat(self._metrics), path.stat()):",
        new="if path.exists():",
        tests=("tests/unit/test_run_lock.py::test_a_run_notices_that_its_folder_was_replaced",),
    ),
    Exhibit(
        name="adam_forgets_how_often_it_stepped",
        source="reliability_audit.md (held: bit-equal after kills)",
        bug=(
            "Moments without their count: bias correction starts at step 1 again, so the first updates after a "
            "resume are up to 1 / (1 - beta1) times too large."
        ),
        cost="The update after a resume uses old moments with the correction of a first step.",
        symbol="restore",
        old=('    optimizer.set_adam_steps(actor.optimizer, checkpoint.numbers["adam_step"])\n'),
        new="",
        tests=("tests/gate/test_recipes.py",),
    ),
    Exhibit(
        name="the_count_grows_with_every_parameter",
        source="own comment in dist/platform/mcore.py (Megatron 0.16 with torch's AdamW)",
        bug=(
            "One step counter was shared by all parameters and advanced once for each, so bias correction was "
            "over after the first update."
        ),
        cost=(
            "On a CPU each parameter has another bias correction; the first updates are too small. (Adam on a GPU is another.)"
        ),
        symbol="HostAdam.step",
        old=(
            '                group["step"] = group.get("step", 0) + 1\n'
            '                for p in group["params"]:\n'
            "                    if p.grad is not None:\n"
        ),
        new=(
            '                for p in group["params"]:\n'
            "                    if p.grad is not None:\n"
            '                        group["step"] = group.get("step", 0) + 1\n'
        ),
        tests=("tests/unit/test_platform.py::test_host_adam_equals_torch",),
    ),
    Exhibit(
        name="a_checkpoint_of_a_tensor_that_was_replaced",
        source="own docstring of checkpoint/state.py; reliability_audit.md (held)",
        bug=(
            "The description of the state is kept from one save to the next, and a tensor that was replaced "
            "meanwhile would be saved as it once was."
        ),
        cost=(
            "After offloading, colocation or a first optimizer step that makes new tensors, checkpoints hold old "
            "values and their checksums are right."
        ),
        symbol="ShardCache.of",
        old="if places != self._places:",
        new="if self._places is None:",
        tests=("tests/parallel/test_checkpoint_views.py::test_what_is_saved_is_the_state_whatever_was_replaced",),
    ),
    Exhibit(
        name="decisions_of_steps_that_were_taken_again_count",
        source="our own (rollout/decisions.py: a start voids later steps)",
        bug="A start in decisions.jsonl does not void the lines of the steps that the run takes again.",
        cost="After a resume from an earlier checkpoint, the log explains steps by decisions that nothing was trained on.",
        symbol="read_history",
        old="history.steps = {number: line for number, line in history.steps.items() if number <= step}",
        new="pass",
        tests=("tests/unit/test_replay_command.py::test_decisions_of_a_step_are_void_once_a_start_comes_before_it",),
    ),
    Exhibit(
        name="a_repetition_with_the_config_of_the_first_start_alone",
        source="our own (rollout/decisions.py: parts)",
        bug="The whole run is repeated with the config of its first start, whatever it was resumed with.",
        cost="A run that went on with another layout or learning rate is said not to be reproducible.",
        symbol="parts_of",
        old="if parts and computed(parts[-1].config) == computed(config):",
        new="if parts:",
        tests=("tests/unit/test_replay_command.py::test_a_run_that_went_on_with_other_settings_comes_out_again",),
    ),
    Exhibit(
        name="a_streamed_step_is_saved_half_trained",
        source="own: issue 24 (training.stream)",
        bug="A request to end the run is answered between two streamed minibatches, and the checkpoint has half a step.",
        cost="The resumed run takes the first updates of the step twice.",
        symbol="Schedule._wait",
        old="partial(task.wait, not self._in_updates)",
        new="task.wait",
        tests=("tests/parallel/test_streaming.py::test_a_run_that_is_killed_between_minibatches_ends_like_an_undisturbed_one",),
    ),
    Exhibit(
        name="restarted_ranks_sample_a_step_again",
        source="own: issue 24 (decisions/0038)",
        bug="The service samples a step for restarted ranks whose rollouts it has kept.",
        cost="Finished groups are lost, and the prompts of a step are taken twice.",
        symbol="RolloutService._collect",
        old="if step in self._batches:",
        new="if step in self._batches and not self._keeps:",
        tests=("tests/parallel/test_restart.py::test_kills_one_after_the_other_change_nothing",),
    ),
    Exhibit(
        name="the_live_page_mixes_two_histories",
        source="own: issue 27, item 1 (a run that is restarted must not break the page)",
        bug="The live page knows a changed file by its size alone, and a file may be cut for a restart and grow again.",
        cost="Its curves go on showing the steps that the restart dropped.",
        symbol="_stamp",
        old="return status.st_ino, status.st_size, status.st_mtime_ns",
        new="return status.st_ino, status.st_size, 0",
        tests=("tests/unit/report/test_live_run.py::test_a_file_that_grows_is_cut_and_replaced_is_followed",),
    ),
    Exhibit(
        name="todays_date_in_the_prompts",
        source="own (issue 41): templates of Llama 3, gpt-oss and SmolLM3 call strftime_now",
        bug="A chat template prints today's date, by the machine's time zone and language.",
        cost="A run that is resumed on another day trains on other prompts.",
        symbol="load_tokenizer",
        old='if "strftime_now" in str(tokenizer.chat_template):',
        new='if "strftime_never" in str(tokenizer.chat_template):',
        tests=("tests/unit/data/test_data.py::test_a_template_sees_the_start_of_the_run",),
    ),
    Exhibit(
        name="a_resume_forgets_the_changes_of_its_start",
        source="own: issue 44",
        bug="The documented line resumed with the config file: what the run's own command line had changed was lost.",
        cost="30 steps became 5, and with a mistyped name a new run was trained. Nobody said so.",
        symbol="config_of",
        old="if (saved := run_dir / CONFIG_FILE).is_file():",
        new="if (saved := run_dir / CONFIG_FILE):",
        tests=("tests/unit/test_resume_command.py::test_a_mistyped_run_is_an_error_with_the_near_ones",),
    ),
    Exhibit(
        name="a_dead_run_looks_alive",
        source="own: issue 44",
        bug="The live page takes a run without summary for one under way: a green dot beside a step of three hours ago.",
        cost="A night of GPU hours that nobody resumes.",
        symbol="is_gone",
        old='owner["start"] != _start_of(owner["pid"])',
        new='not owner["start"]',
        tests=("tests/unit/report/test_live_run.py::test_a_run_that_begins_is_restarted_and_replaced_stays_on_the_page",),
    ),
    Exhibit(
        name="a_resume_with_other_conversations",
        source="own: issue 41",
        bug="A resume of tepo sft compares the number of the conversations alone.",
        cost="With another seed, batch size, tokenizer or order some conversations are learned twice and others never.",
        symbol="refuse_changes",
        old="if name in before and before[name] != value:",
        new="if False:",
        tests=("tests/parallel/test_sft.py::test_a_checkpoint_of_another_order_is_refused",),
    ),
    Exhibit(
        name="an_evaluation_of_other_problems_goes_on",
        source="own: issue 41",
        bug="A resumed evaluation keeps a benchmark whose file has other problems or answers, or whose prompts changed.",
        cost="The table has figures of two versions of the data, and of two chat templates.",
        symbol="_entry",
        old='"data": fingerprint(problems.prompts)',
        new='"data": ""',
        tests=("tests/unit/evaluation/test_evaluate.py::test_a_resume_with_something_else_is_refused",),
    ),
)
