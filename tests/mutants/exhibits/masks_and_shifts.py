"""Terms, tokens and rows that are taken or left out wrongly."""

from tests.mutants.exhibit import Exhibit

KIND = "masks and shifts"
EXHIBITS = (
    Exhibit(
        name="kl_in_the_reward_never_reaches_the_batch",
        source="NeMo-RL #3792",
        bug=(
            "The rewards that a VAPO term adds were computed but never written into the training batch, so the "
            "term was exactly 0 at every step and its coefficient did nothing. The config key was accepted and "
            "the code ran; ablations of the coefficient compared a thing with itself."
        ),
        cost=(
            "With objective.ref_kl.where=reward the KL is computed, logged as reward/ref_kl, and leaves the "
            "advantages as they were."
        ),
        symbol="BatchUpdates._with_reference",
        old=("return replace(batch, rollouts=rollouts, advantages_B=group_advantages(rollouts, self.objective.advantage))"),
        new="return replace(batch, rollouts=rollouts)",
        tests=("tests/gate/test_covering.py::test_a_row_trains_to_the_reference",),
    ),
    Exhibit(
        name="a_penalty_without_gradient",
        source="NeMo-RL #3792 (variant: the value is right and the weight has no effect)",
        bug="As above, one level lower: the penalty is in the loss and in the metric, and nothing learns from it.",
        cost="Loss and loss/ref_kl are right to the last bit; the reference policy does not hold the policy.",
        symbol="Objective.__call__",
        old="value_R = value_R - self.ref_kl.beta * ref_penalty_R",
        new="value_R = value_R - self.ref_kl.beta * ref_penalty_R.detach()",
        tests=("tests/unit/losses/test_objectives.py::test_reference_kl_pulls_towards_the_reference_alone",),
    ),
    Exhibit(
        name="the_row_of_the_token_itself",
        source="verl #3287",
        bug=(
            "The loss mask of SFT was shifted by one, so that a row was asked for the token it already holds, or "
            "the first token of an answer was left out. The loss falls nicely, even better than it should."
        ),
        cost="Each response token is predicted from its own position: log-probs are of something else.",
        symbol="_rows",
        old="before_N = token_N - first_G[sequence_N] - 1  # place",
        new="before_N = token_N - first_G[sequence_N]  # place",
        tests=(
            "tests/unit/ops/test_packing.py::test_packing_keeps_every_response_token",
            "tests/unit/ops/test_shared_prompts.py::test_each_response_token_has_the_row_before_it",
        ),
    ),
    Exhibit(
        name="labels_rolled_after_the_cut",
        source="verl #4250, miles #2215",
        bug=(
            "Labels were rolled by one after the sequence had been cut for context parallelism, so the last row "
            "of every chunk was trained on a token of another chunk. Two rows in thousands are wrong, the loss "
            "rises by little, and without context parallelism it is right."
        ),
        cost=(
            "Right for cp = 1 without shared prompts; else wrong at the end of each zigzag chunk, and for every "
            "first response token behind a shared prompt."
        ),
        symbol="pack",
        old="labels_R=rows.label_N[is_mine_N],",
        new="labels_R=token_ids_S[mine].roll(-1)[place_S[rows.row_N[is_mine_N]]],",
        tests=(
            "tests/unit/ops/test_packing.py::test_packing_keeps_every_response_token",
            "tests/parallel/test_layouts.py::test_layout_equals_reference",
        ),
    ),
    Exhibit(
        name="what_tools_wrote_is_trained_on",
        source="Search-R1 #21, RAGEN #71",
        bug=(
            "Tokens that a search engine had written were in the loss and in the KL, or the mask was inverted. "
            "The model learns to write search results; rewards rise at first and the run breaks much later."
        ),
        cost="What `append` adds counts as chosen by the policy, with log-prob 0.",
        symbol="Conversation.append",
        old="self._add(ids, False, [0.0] * len(ids))",
        new="self._add(ids, True, [0.0] * len(ids))",
        tests=("tests/unit/rollout/test_custom_rollout.py::test_what_the_model_wrote_and_what_it_did_not",),
    ),
    Exhibit(
        name="what_was_cut_is_not_trained_on",
        source="slime #1445",
        bug=(
            "In partial rollouts the tokens from before an interruption got the wrong mask. Nothing fails: they "
            "simply stop learning, and exactly the long responses are hit."
        ),
        cost=(
            "Everything that older weights sampled counts as prompt. Token ids, versions and log-probs stay "
            "right, and the gate compares the rest only."
        ),
        symbol="merge",
        old="response_mask_L=torch.cat([aborted.response_mask_L, end.response_mask_L[begun:]]),",
        new="response_mask_L=end.response_mask_L,",
        tests=("tests/unit/rollout/test_fleet.py::test_what_is_under_way_when_new_weights_come",),
    ),
    Exhibit(
        name="log_probs_shifted_by_one",
        source="prime-rl #606, ms-swift #8427",
        bug=(
            "Log-probs of packed samples were aligned to the next token. Importance ratios are then near 1 in the "
            "mean and wild per token, which truncation and clipping hide."
        ),
        cost=(
            "Each token has the log-prob of the one before it, the first has 0. It enters the corrections tis, "
            "mis, icepop, old_logprobs=rollout and the mismatch."
        ),
        symbol="TrainBatch.rollout_logprobs_N",
        old="r.rollout_logprobs_L[r.response_mask_L]",
        new="r.rollout_logprobs_L[r.response_mask_L.roll(-1)]",
        tests=(
            "tests/parallel/test_gate.py::test_each_server_is_compared_with_the_version_that_it_says",
            "tests/unit/rollout/test_custom_rollout.py::test_rows_labels_and_log_probs_skip_the_holes",
        ),
    ),
    Exhibit(
        name="experts_one_token_late",
        source="slime #1052",
        bug=(
            "Replayed experts were misaligned by the token that has none (the last one). Training runs through "
            "any experts that it is given; log-probs drift, which reads like the usual mismatch of an expert "
            "model."
        ),
        cost="Each token is sent to the experts of the token before it. Shapes and `Routing.check` pass.",
        symbol="_checked_experts",
        old="experts_LKT.numpy()[:-1] = known_LKT",
        new="experts_LKT.numpy()[0], experts_LKT.numpy()[1:] = known_LKT[0], known_LKT",
        tests=("tests/unit/rollout/test_expert_replay.py::test_the_layers_with_experts_are_kept_and_the_last_token_has_none",),
    ),
    Exhibit(
        name="falling_entropy_is_rising_entropy",
        source="own (TEPO, Eq. 4); CHANGELOG Added",
        bug="TEPO's mask is on tokens whose entropy falls. Exchanged, the method is Panel E's by another name.",
        cost="The KL acts on the other tokens; mask share and curves look alike.",
        symbol="Objective.__call__",
        old="entropy_change_R = stats.entropy_R.detach() - inputs.old_entropy_R",
        new="entropy_change_R = inputs.old_entropy_R - stats.entropy_R.detach()",
        tests=("tests/unit/losses/test_objective_rows.py::test_a_row_computes_its_method",),
    ),
    Exhibit(
        name="cut_off_responses_are_trained_on",
        source="own: issue 23 (overlong filtering); DAPO, arXiv 2503.14476, section 3.4",
        bug="The filter of cut-off responses is right and is not called; advantages do not change with it.",
        cost="Responses without an end are pushed down as wrong answers, which overlong filtering is there to prevent.",
        symbol="BatchUpdates.take",
        old="without_truncated(part.rollouts) if self.objective.mask_truncated else part.rollouts",
        new="part.rollouts",
        tests=("tests/parallel/test_overlong_filtering.py::test_cut_off_responses_train_nothing[CP2]",),
    ),
)
