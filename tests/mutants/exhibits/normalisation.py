"""Sums divided by the wrong number, or over the wrong tokens."""

from tests.mutants.exhibit import Exhibit

KIND = "normalisation"
EXHIBITS = (
    Exhibit(
        name="half_of_a_sequence_has_its_own_mean",
        source="slime #2235",
        bug=(
            "Advantages were whitened over the data-parallel group alone, so every context-parallel rank shifted "
            "and scaled its own zigzag half of a sequence by its own mean. The loss stayed finite and of the "
            "usual size, and a run without context parallelism was right; two halves of one response learned from "
            "different advantages."
        ),
        cost=(
            "Under cp > 1 the sequence ratio (TEPO, GSPO), `mis` and everything else that uses `mean_detached` is "
            "that of the rank's own half over the length of the whole. Without cp nothing changes."
        ),
        symbol="Segments.sum_detached",
        old=("        if not self._alone:\n            dist.all_reduce(local_G, group=self.group)\n"),
        new="",
        tests=(
            "tests/parallel/test_statistics.py::test_sequence_ratio_over_context_parallel_ranks",
            "tests/parallel/test_layouts.py::test_layout_equals_reference",
        ),
    ),
    Exhibit(
        name="length_counted_on_one_context_rank",
        source="verl #5983, again verl #6049",
        bug=(
            "The number of tokens in the denominator was summed over data parallelism but not over context "
            "parallelism, so it was too small by about the factor cp. Losses are not comparable between layouts "
            "anyway, and nobody compared gradients; the effective learning rate grew with cp."
        ),
        cost=(
            "`lengths_G` counts the response rows of this rank only. It enters sequence means, the geometric-mean "
            "ratio and the mean ratio that is reported."
        ),
        symbol="pack",
        old="torch.bincount(rows.sequence_N, minlength",
        new="torch.bincount(sequence_R, minlength",
        tests=(
            "tests/unit/ops/test_packing.py::test_packing_keeps_every_response_token",
            "tests/parallel/test_layouts.py::test_layout_equals_reference",
        ),
    ),
    Exhibit(
        name="what_is_reported_is_of_one_context_rank",
        source="SkyRL #1420",
        bug=(
            "Metrics and a correction of gradients were reduced over a group that did not fit dp x cp, so they "
            "were doubled or halved under context parallelism. The curves looked plausible, since only their "
            "scale was off; learning rates were tuned against wrong losses and gradient norms."
        ),
        cost=(
            "Under cp > 1 rank 0 reports the loss, clip shares, mask share and ratios of its own chunks; ratio_B "
            "comes out near 1/cp of the truth. Gradients stay right."
        ),
        symbol="UpdateAccumulator.reduce",
        old="dist.all_reduce(flat, group=groups.dp_cp.group)",
        new="dist.all_reduce(flat, group=groups.dp.group)",
        tests=("tests/parallel/test_layouts.py::test_layout_equals_reference",),
    ),
    Exhibit(
        name="each_microbatch_is_its_own_mean",
        source="verl #6957 (the same in prime-rl #583, NeMo-RL #212, NeMo-RL #3791)",
        bug=(
            "A refactoring divided the critic's loss by the tokens of the micro-batch instead of those of the "
            "minibatch, so K micro-batches gave a gradient about K times too large (2.05 at K = 2, 4.06 at K = "
            "4). Adam hides a constant factor and the tests used one micro-batch; short micro-batches counted "
            "more per token and clipping of the gradient norm acted all the time."
        ),
        cost=(
            "The sum over microbatches and ranks becomes a sum of means. With one microbatch on one rank it is "
            "right (but for responses without tokens, which are counted as one)."
        ),
        symbol="token_mean",
        old="(1.0 / whole.tokens)",
        new="(1.0 / segments.lengths_G.sum())",
        tests=("tests/parallel/test_layouts.py::test_number_of_microbatches",),
    ),
    Exhibit(
        name="mean_over_the_sequences_of_a_microbatch",
        source="OpenRLHF #1249",
        bug=(
            "With gradient accumulation every micro-batch took a mean of its own and the means were averaged, so "
            "a sequence weighed more in a small micro-batch than in a large one. It is invisible with micro- "
            "batches of one size and in the loss curve."
        ),
        cost=(
            "GSPO and the objective sequence_mean_token_mean: the mean is over the sequences of one microbatch. "
            "Right for one microbatch on one rank."
        ),
        symbol="sequence_mean_token_mean",
        old="(whole.sequences * segments.lengths_G)",
        new="(segments.lengths_G.numel() * segments.lengths_G)",
        tests=("tests/parallel/test_objective_layouts.py::test_same_on_every_layout",),
    ),
    Exhibit(
        name="tokens_of_this_rank_alone",
        source="TRL #3938 (prime-rl #583, prime-rl #2358, prime-rl #2562)",
        bug=(
            "DAPO's token mean was normalised by what one process and one accumulation step held, which is DAPO's "
            "only on one GPU without accumulation. The number is a mean, so it looks right; ranks with short "
            "responses pulled harder per token."
        ),
        cost=(
            "Each rank's gradient is scaled by its own share of the tokens. Right on one data-parallel rank; the "
            "reported loss stays right everywhere."
        ),
        symbol="Actor.backward",
        old="self.schedule.forward_backward(self.packer.pack(batch, plan), loss, batch.num_tokens)",
        new=(
            "mine = [batch.response_lengths[i] for indices in plan[self.groups.dp.rank] for i in indices]\n"
            "            self.schedule.forward_backward(self.packer.pack(batch, plan), loss, sum(mine))"
        ),
        tests=("tests/parallel/test_layouts.py::test_layout_equals_reference",),
    ),
    Exhibit(
        name="token_sum_is_a_token_mean",
        source="verl #911, verl #931",
        bug=(
            "`seq-mean-token-sum` was written with the line of `token-mean`, so both options did the same. The "
            "option was accepted, the loss was finite, and a comparison of the two found no difference between "
            "them, which read like a result."
        ),
        cost="Panel D's and Dr. GRPO's aggregation become the token mean.",
        symbol="sequence_mean_token_sum",
        old="(1.0 / whole.sequences)",
        new="(1.0 / whole.tokens)",
        tests=(
            "tests/unit/losses/test_objective_parity.py::test_some_combinations_of_parts",
            "tests/unit/losses/test_objective_rows.py::test_a_row_computes_its_method",
        ),
    ),
    Exhibit(
        name="length_bias_is_back_in_dr_grpo",
        source="TRL #3256",
        bug=(
            "The loss divided each response by its own length, which makes long wrong answers cheap: Dr. GRPO was "
            "published to take that out. Rewards rise either way; what shows is only that responses get longer "
            "and longer."
        ),
        cost="The row `dr_grpo` has 1/|y| again.",
        symbol="OBJECTIVES",
        old='"dr_grpo": _GRPO.replace(clip_high=0.2, aggregate="sequence_mean_token_sum_norm", advantage="mean")',
        new='"dr_grpo": _GRPO.replace(clip_high=0.2, aggregate="sequence_mean_token_mean", advantage="mean")',
        tests=("tests/unit/losses/test_objective_rows.py::test_the_numbers_of_a_row",),
    ),
    Exhibit(
        name="divided_again_by_the_number_of_microbatches",
        source="ms-swift #10117",
        bug=(
            "DAPO's and CISPO's loss was normalised over the whole batch already and then divided by the number "
            "of accumulation steps once more. The gradient was 1/G of what it should be, which looks like a "
            "careful learning rate."
        ),
        cost=(
            "Gradients shrink with the number of microbatches of a rank; loss and metrics do not. Right with one microbatch."
        ),
        symbol="PipelineSchedule.forward_backward",
        old="return loss(microbatch, output.squeeze(0)) * tokens, local, {}",
        new="return loss(microbatch, output.squeeze(0)) * tokens / len(microbatches), local, {}",
        tests=("tests/parallel/test_layouts.py::test_number_of_microbatches",),
    ),
    Exhibit(
        name="megatron_divides_by_something_else",
        source="verl #6836",
        bug=(
            "With context parallelism a bridge switched `calculate_per_token_loss` on behind the trainer's back, "
            "and the trainer gave it no token counts. The policy loss was only slightly wrong, and only the "
            "auxiliary losses of an expert model exploded, which is why it was looked for in the wrong place."
        ),
        cost=(
            "Megatron divides each microbatch's loss by its own rows, by the number of microbatches and by the "
            "data-parallel size instead of once by N."
        ),
        symbol="own_fields",
        old="calculate_per_token_loss=True,",
        new="calculate_per_token_loss=False,",
        tests=("tests/parallel/test_layouts.py::test_layout_equals_reference",),
    ),
    Exhibit(
        name="prompt_tokens_in_the_denominator",
        source="TRL #6024",
        bug=(
            "The normaliser counted the tokens of another set than the one the loss is summed over (there, of the "
            "whole generation batch), so gradients were half or four times what they should be, depending on "
            "settings that have nothing to do with the loss."
        ),
        cost="The token mean divides by prompt and response tokens: long prompts shrink the step.",
        symbol="MinibatchInputs.__init__",
        old="float(max(1, batch.num_tokens))",
        new="float(max(1, sum(batch.lengths)))",
        tests=("tests/parallel/test_layouts.py::test_layout_equals_reference",),
    ),
    Exhibit(
        name="mean_of_means_in_the_log",
        source="SkyRL #1296, SkyRL #925",
        bug=(
            "Means of micro-batches were averaged, whatever each was a mean of. Metrics of small micro-batches "
            "counted as much as those of large ones; decisions were taken on entropies and clip shares that were "
            "off by some per cent."
        ),
        cost="`means()` becomes the mean of the parts' means.",
        symbol="Metrics.add",
        old="(n + float(numerator), d + float(denominator))",
        new="(n + (float(numerator) / float(denominator) if denominator else 0.0), d + bool(denominator))",
        tests=("tests/unit/rollout/test_record.py::test_rollouts_and_metrics_come_back_bit_for_bit",),
    ),
    Exhibit(
        name="rewards_normalised_over_the_whole_batch",
        source="slime #1414, slime #1918, slime #2230, miles #2369",
        bug=(
            "When groups were not all of the same size, the group normalisation quietly fell back to the whole "
            "batch. Advantages still had mean 0 and standard deviation 1; an easy prompt's right answers were "
            "rewarded for the prompt being easy."
        ),
        cost="Mean and standard deviation are those of the batch, not of the prompt.",
        symbol="group_advantages",
        old="groups = [split_samples(group) for group in split_groups(rollouts)]",
        new="groups = [split_samples(rollouts)]",
        tests=(
            "tests/unit/losses/test_advantages.py::test_groups_are_runs_of_one_prompt",
            "tests/unit/losses/test_objective_rows.py::test_group_advantages",
        ),
    ),
    Exhibit(
        name="one_sequence_too_few",
        source="own (the wiring of batch and objective was compared with itself)",
        bug=(
            "The number of sequences that means over sequences are divided by was off by one. It is the same on every layout, "
            "so a comparison of layouts with one rank sees nothing, and Adam hides a constant factor."
        ),
        cost="Every row with a mean over sequences (GSPO, Dr. GRPO, Panel D) has gradients that are G / (G - 1) too large.",
        symbol="MinibatchInputs.__init__",
        old="sequences=torch.tensor(float(len(batch)), device=device),",
        new="sequences=torch.tensor(float(len(batch) - 1), device=device),",
        tests=("tests/parallel/test_every_objective.py::test_every_row_trains_to_the_reference[1 rank-every row]",),
    ),
    Exhibit(
        name="a_response_is_one_token_longer",
        source="own (the wiring of batch and objective was compared with itself)",
        bug=(
            "The length of a response counted one token too many (a stop token, say), on every layout alike. The "
            "geometric-mean ratio is then nearer to 1, by more for short responses, and looks healthy."
        ),
        cost="Sequence ratios (TEPO, GSPO), `mis` and the mean over a sequence's tokens are too small.",
        symbol="pack",
        old="minlength=len(rows.sequences)).clamp(min=1).float(),",
        new="minlength=len(rows.sequences)).add(1).float(),",
        tests=("tests/parallel/test_every_objective.py::test_every_row_trains_to_the_reference[1 rank-every row]",),
    ),
    Exhibit(
        name="the_prompt_counts_as_response_in_a_weighting",
        source="own (the wiring of batch and objective was compared with itself)",
        bug=(
            "The whole minibatch of a weighting had the lengths of sequences in the place of those of responses. "
            "Only a sequence ratio reads them there, and only to see which tokens are clipped."
        ),
        cost="Clip-Cov with a sequence ratio draws tokens that are clipped anyway. Every other combination is right.",
        symbol="MinibatchInputs.whole",
        old="torch.tensor(self._batch.response_lengths,",
        new="torch.tensor(self._batch.lengths,",
        tests=("tests/unit/losses/test_minibatch_inputs.py::test_the_whole_minibatch",),
    ),
)
