"""Batches, metrics and errors on their way from the rollout service to the ranks."""

from __future__ import annotations

from tests.mutants.exhibit import Exhibit

KIND = "rollout service"
EXHIBITS = (
    Exhibit(
        name="a_killed_service_leaves_its_tokenizer",
        source="our own: CHANGELOG Fixed (a folder of a killed run stayed in TMPDIR)",
        bug="The file with which graders decode lies in a folder of Python's tempfile, which a killed process does not remove.",
        cost="Each kill leaves the tokenizer of the model in TMPDIR, 10 to 30 MB, until the disk of the node is full.",
        symbol="decoder_file",
        old='with PrivateFolder.create("decoder") as folder:\n        path = str(folder.path / "tokenizer.json")',
        new='with __import__("tempfile").TemporaryDirectory() as folder:\n        path = str(Path(folder) / "tokenizer.json")',
        tests=("tests/lint/test_layering.py::test_temporary_folders_are_private_folders",),
    ),
    Exhibit(
        name="the_last_token_of_a_step_is_overwritten",
        source="our own: decisions/0031 (how a batch travels)",
        bug=(
            "The flat arrays of a batch lie one after the other, and one began an element too early: the first log-prob, which "
            "is 0 for a token of a prompt, overwrites the last token id, and the first mask a byte of the last log-prob."
        ),
        cost="The last token of each step has id 0. All other tokens, all lengths and the size of the file are right.",
        symbol="token_arrays",
        old="offset += tokens * dtype.itemsize",
        new="offset += (tokens - 1) * dtype.itemsize",
        tests=("tests/parallel/test_batch_memory.py::test_a_token_takes_nine_bytes_and_nothing_is_left",),
    ),
    Exhibit(
        name="token_ids_in_16_bits",
        source="our own: decisions/0031 (int32 ids, 9 bytes a token)",
        bug="Ids of small vocabularies fit into 16 bits, which halves them. Larger ids wrap around without an error.",
        cost="With a vocabulary above 65,536 rare tokens are trained as other tokens. Small vocabularies show nothing.",
        symbol="_TOKEN_FIELDS",
        old='"token_ids_L": np.dtype(np.int32),',
        new='"token_ids_L": np.dtype(np.uint16),',
        tests=("tests/parallel/test_batch_memory.py::test_every_rank_gets_every_bit",),
    ),
    Exhibit(
        name="a_batch_is_released_before_all_ranks_have_mapped_it",
        source="our own: decisions/0031 (the service may release the file when `receive` returns on any rank)",
        bug=(
            "Rank 0 lets the service close the file while a slower rank has not opened it. The path names a descriptor, which "
            "the next batch takes: the slow rank then trains on the batch of the next step."
        ),
        cost="A race that a busy machine loses now and then: ranks train on different batches, or one ends without its file.",
        symbol="BatchReceiver.receive",
        old="        dist.barrier(group=groups.host)\n",
        new="",
        tests=("tests/parallel/test_batch_memory.py::test_a_file_is_there_until_the_last_rank_has_mapped_it",),
    ),
    Exhibit(
        name="metrics_that_are_zero_are_left_out",
        source="our own: CHANGELOG Fixed (rollout/stale_groups was counted and never recorded)",
        bug="The header of a batch has only those metrics that are not zero, as if a zero were a metric that nobody measured.",
        cost="A step whose answers are all wrong has no accuracy in the records, and means over steps are too high.",
        symbol="BatchMemory.write",
        old="header = BatchHeader(",
        new="metrics = {name: pair for name, pair in metrics.items() if pair[0]}\n        header = BatchHeader(",
        tests=("tests/parallel/test_batch_memory.py::test_every_rank_gets_every_bit",),
    ),
    Exhibit(
        name="experts_of_sequences_that_another_pass_needed_are_not_sent",
        source="our own: decisions/0031 (each once in a step)",
        bug="A machine that has got experts in a step is taken to have all of them: later minibatches lack some.",
        cost="On several machines tokens are routed to expert 0 from the second pass on. One machine shows nothing.",
        symbol="BatchReceiver.fetch_experts",
        old="sorted({i for dp in ranks for i in needed[dp]} - fetched)",
        new="[] if fetched else sorted({i for dp in ranks for i in needed[dp]})",
        tests=(
            "tests/parallel/test_batch_memory.py::test_a_machine_gets_the_experts_of_the_sequences_that_it_packs_and_each_once",
        ),
    ),
    Exhibit(
        name="experts_are_never_fetched",
        source="our own: decisions/0031; found in review, when no test of a whole run noticed it",
        bug="The training loop does not tell the packer to fetch experts, though receiver and packer are each right.",
        cost="On several machines all tokens beyond the first machine are routed to expert 0. One machine shows nothing.",
        symbol="_train",
        old="        actor.packer.fetch_experts = batches.fetch_experts\n",
        new="",
        tests=("tests/parallel/test_expert_replay.py::test_a_whole_run_on_two_machines_equals_that_on_one",),
    ),
    Exhibit(
        name="experts_of_the_minibatch_by_its_own_order",
        source="our own: decisions/0031; ids_B names the place in the rollout batch",
        bug="The sequences of a shuffled minibatch are fetched by their place in it instead of that in the rollout batch.",
        cost="On several machines the wrong experts arrive and those that are packed are all 0. One machine shows nothing.",
        symbol="Packer.pack",
        old="ids = range(len(batch)) if batch.ids_B is None else batch.ids_B.tolist()",
        new="ids = range(len(batch))",
        tests=("tests/parallel/test_expert_replay.py::test_experts_that_come_from_another_machine",),
    ),
    Exhibit(
        name="prompts_with_other_experts_are_shared",
        source="our own: decisions/0031 (a digest in the header)",
        bug="Ranks compare the tokens of prompts alone, because the experts have not arrived when prompts are grouped.",
        cost="Under training.share_prompts and replayed experts a prompt is routed as another sample's prompt was.",
        symbol="TrainBatch.prompt_ids",
        old="numbers.setdefault((rollout.token_ids_L[:length].numpy().tobytes(), experts), len(numbers))",
        new='numbers.setdefault((rollout.token_ids_L[:length].numpy().tobytes(), b""), len(numbers))',
        tests=("tests/parallel/test_batch_memory.py::test_prompts_are_equal_if_their_tokens_and_experts_are",),
    ),
    Exhibit(
        name="the_next_answer_is_taken_for_the_awaited_one",
        source="our own: decisions/0031 (answers may overtake each other)",
        bug=(
            "Rank 0 gives the next answer that arrives to the call for which it waits. That is right until two calls are under "
            "way, as when a round of weights is loaded while the next one is staged."
        ),
        cost="A round of weights counts as loaded when another call has ended, and its buffer is written again too early.",
        symbol="ServiceClient.receive",
        old="self._answers[answer.number] = answer",
        new="self._answers[pending.number] = answer",
        tests=("tests/unit/controller/test_service.py::test_answers_that_nobody_waits_for_yet_are_kept",),
    ),
    Exhibit(
        name="a_stopped_service_outlives_the_launcher",
        source="own (issue 43: the launcher starts the service)",
        bug="The service notices the end of its launcher by itself, which it cannot while it is stopped or busy.",
        cost="After a SIGKILL of the launcher the servers keep their GPUs, and the next run finds none.",
        symbol="ServiceProcess._start",
        old="preexec_fn=functools.partial(die_with_parent, os.getpid()),",
        new="",
        tests=("tests/unit/controller/test_service.py::test_the_service_ends_with_the_launcher",),
    ),
    Exhibit(
        name="a_failed_evaluation_counts_as_done",
        source="our own: CHANGELOG Changed (the rollout service)",
        bug="The service waits for its work without asking for the result, so an error of work without a result is lost.",
        cost="An evaluation that failed leaves no record and no message, and early stopping goes by older evaluations.",
        symbol="RolloutService._wait",
        old='return Waited("done", self._tasks.pop(number).future.result(0), save=',
        new=(
            "ended = self._tasks.pop(number).future\n                "
            'return Waited("done", None if ended.exception() is not None else ended.result(), save='
        ),
        tests=("tests/unit/controller/test_service.py::test_an_evaluation_that_fails_is_an_error_of_its_wait",),
    ),
    Exhibit(
        name="an_error_of_the_service_is_known_to_rank_0_alone",
        source="our own: decisions/0031 (how they talk); errors are raised on every rank since commit 50c1db7",
        bug="Only rank 0 calls the service. Where only rank 0 raises its error, the others go on with a result that is none.",
        cost="The other ranks fail with an error of their own or wait for rank 0, and the launcher may report the wrong one.",
        symbol="broadcast_result",
        old="    if error is not None:\n",
        new="    if error is not None and group.rank() == 0:\n",
        tests=("tests/parallel/test_collectives.py::test_every_rank_gets_the_result_of_rank_0_or_its_error",),
    ),
    Exhibit(
        name="a_blocked_thread_costs_all_its_samples",
        source="own (issue 26: functions that block their thread)",
        bug="One sample's function blocks the thread of all, and all of them are lost at the deadline.",
        cost="A step without samples; with rollout.max_failed_share the run ends for one `time.sleep`.",
        symbol="FunctionThread._abandon",
        old="elif blocking is None or call is blocking:",
        new="elif True:",
        tests=("tests/unit/rollout/test_custom_rollout.py::test_each_of_several_blocking_samples_is_lost",),
    ),
    Exhibit(
        name="a_new_thread_has_the_clients_of_the_blocked_one",
        source="own (issue 26); clients and locks of asyncio belong to one event loop",
        bug="The other samples of a blocked thread are made again with the clients and locks that the file made at first.",
        cost="Some of them fail with `is bound to a different event loop`; with a semaphore at the top of the file, most.",
        symbol="FunctionThread.run",
        old="if self._started:",
        new="if False:",
        tests=("tests/unit/rollout/test_gateway.py::test_a_new_thread_has_clients_and_locks_of_its_own",),
    ),
    Exhibit(
        name="a_malformed_call_is_dropped",
        source="own (rollout/chat.py); found while the forms of other families were added",
        bug="Of several tool calls in one turn, the malformed one is left out, and the message holds neither it nor its text.",
        cost="The agent runs some of the calls and never learns of the others; against a public server it sees the whole text.",
        symbol="_hermes",
        old="for block in _blocks(text))",
        new='for block in _blocks(text) if block.strip().endswith("}"))',
        tests=("tests/unit/rollout/test_tool_calls.py::test_calls_are_those_of_vllm_s_parsers",),
    ),
    Exhibit(
        name="a_stop_string_leaves_the_context",
        source="own (docs/agents.md); found by running one agent against vLLM's own server",
        bug="The message leaves out the stop string although the request asks for it.",
        cost="An agent that works against a public server takes its tool calls for final answers; nothing is graded as meant.",
        symbol="AgentSample._answer",
        old="stopped_by is not None and not request.keeps_stop",
        new="stopped_by is not None",
        tests=("tests/unit/rollout/test_gateway.py::test_a_message_includes_its_stop_string_if_the_request_says_so",),
    ),
)
