"""Log-probs and samples of another distribution than the one that is meant."""

from tests.mutants.exhibit import Exhibit

KIND = "log-probs"
EXHIBITS = (
    Exhibit(
        name="training_forgets_the_temperature",
        source="OpenRLHF #853, OpenRLHF #857, NeMo-RL #935, TRL #3029, miles #1345, slime #2085",
        bug=(
            "The engine sampled at a temperature and the trainer computed its log-probs at 1. With temperature 1 "
            "both agree, and elsewhere the ratio to the old policy still is, since both sides of it are wrong "
            "alike; the gradient is that of another distribution."
        ),
        cost="Log-probs, entropies, KL and gradients are those of temperature 1.",
        symbol="OutputStats.__call__",
        old="group = microbatch.labels_R, self.temperature,",
        new="group = microbatch.labels_R, 1.0,",
        tests=("tests/parallel/test_actor.py::test_old_statistics_equal_transformers_on_every_layout",),
    ),
    Exhibit(
        name="truncated_sampling_is_not_renormalized",
        source="own: issue 23, item 3 (top-p and top-k in the engine alone)",
        bug=(
            "The engine sampled with top-p or top-k, and the trainer computed log-probs over the whole vocabulary. The ratio "
            "of new to old still starts at 1."
        ),
        cost="Log-probs are too low by the mass that was cut, and tokens that could not be sampled get gradients.",
        symbol="OutputStats.__call__",
        old="mask_RK = None if mask is None else mask.rows(microbatch.token_R)",
        new="mask_RK = None",
        tests=("tests/parallel/test_truncated.py::test_recomputed_masks_are_those_of_the_model_on_every_layout",),
    ),
    Exhibit(
        name="entropy_of_the_distribution_before_truncation",
        source="own: issue 23, item 3 (entropies included)",
        bug="Log-probs were renormalized over the sampling mask, and the entropy was summed over the whole vocabulary.",
        cost="Entropies, and with them the KL mask and weights of tokens, are those of no distribution.",
        symbol="local_statistics",
        old="parts = masked_statistics(logits, shard.mask_RK, temperature)",
        new=(
            "parts = (*masked_statistics(logits, shard.mask_RK, temperature)[:2], "
            "kernels.statistics(logits, shard.columns, temperature)[2])"
        ),
        tests=(
            "tests/unit/ops/test_truncated.py::test_values_and_gradients_are_those_of_the_renormalized_distribution",
            "tests/parallel/test_truncated.py::test_steps_on_the_engines_masks_are_those_of_the_reference",
        ),
    ),
    Exhibit(
        name="gradient_outside_of_the_sampling_mask",
        source="own: issue 23, item 3 (gradient through the kept set only)",
        bug="Values were renormalized over the sampling mask, and the gradient pass ran over all columns.",
        cost="Tokens that were cut are pushed down with weights above their probability; values that are logged are right.",
        symbol="write_gradient",
        old="elif logits.size(0) and shard.mask_RK is not None:",
        new="elif logits.size(0) and shard.mask_RK is not None and not out.numel():",
        tests=("tests/parallel/test_truncated.py::test_truncated_statistics_over_tensor_parallel_ranks",),
    ),
    Exhibit(
        name="the_reference_is_not_truncated",
        source="own: issue 23, item 3 (the same set for the reference)",
        bug="Old and new log-probs were renormalized over the sampling mask, and those of the reference policy were not.",
        cost="The KL to the reference has the cut mass as an offset, and is not 0 between equal policies.",
        symbol="Actor._whole_stats",
        old="device_mask(batch, self.groups.device)",
        new="(device_mask(batch, self.groups.device) if replays else None)",
        tests=("tests/parallel/test_truncated.py::test_recomputed_masks_are_those_of_the_model_on_every_layout",),
    ),
    Exhibit(
        name="masks_of_an_interrupted_response_change_places",
        source="own: issue 23, item 3 (a mask that crosses an update of weights)",
        bug="The sampling masks of the continuation were put before those of the interrupted part. Their number is right.",
        cost="Log-probs of interrupted responses are over the candidates of other tokens; only the mismatch metric shows it.",
        symbol="merge",
        old="for r in (aborted, end) if r.sampling_mask is not None",
        new="for r in (end, aborted) if r.sampling_mask is not None",
        tests=("tests/unit/rollout/test_truncated_answers.py::test_masks_are_joined_and_dropped_with_the_tokens",),
    ),
    Exhibit(
        name="the_gradient_forgets_the_temperature",
        source="slime #557 (an argument by position: the temperature never arrived; variant: in backward alone)",
        bug=(
            "The temperature was passed by position into another parameter, so one of two computations did not "
            "have it. Values that are logged came from the other one."
        ),
        cost=(
            "Values are right; in the gradient of the logits the part of the softmax lacks 1/T while the label's "
            "has it, so gradients of a row no longer sum to 0. Right at temperature 1."
        ),
        symbol="coefficients",
        old="scale_R = -1 / (total_R * temperature)",
        new="scale_R = -1 / total_R",
        tests=("tests/parallel/test_statistics.py::test_token_stats_over_tensor_parallel_ranks",),
    ),
    Exhibit(
        name="log_probs_before_the_temperature",
        source="vime #64",
        bug=(
            "vLLM returns raw log-probs by default, before the temperature, and they were compared with the "
            "trainer's tempered ones. All importance ratios were off by the same kind of factor, and truncation "
            "kept them in bounds."
        ),
        cost="The engine's log-probs are those of temperature 1.",
        symbol="VllmApi.command",
        old='"--logprobs-mode", "processed_logprobs"',
        new='"--logprobs-mode", "raw_logprobs"',
        tests=("tests/server/test_engines.py::test_logprobs_are_those_of_transformers_after_temperature",),
    ),
    Exhibit(
        name="own_sampler_returns_log_probs_before_the_temperature",
        source="vime #64 (variant: the torch engine)",
        bug="Our own sampler drew each token at the temperature, and returned its log-prob at temperature 1.",
        cost="The torch engine's log-probs are those of temperature 1.",
        symbol="add_tokens",
        old="logprobs_BV.gather(1, token_B[:, None])",
        new="logits_BV.float().log_softmax(1).gather(1, token_B[:, None])",
        tests=("tests/server/test_engines.py::test_logprobs_are_those_of_transformers_after_temperature[torch-0.7]",),
    ),
    Exhibit(
        name="own_sampler_shares_random_numbers",
        source="own: the torch engine",
        bug="Our own sampler drew the random numbers of the whole batch from the generator of its first sample.",
        cost="A sample depends on the requests next to it, so that nothing is sampled again alike.",
        symbol="add_tokens",
        old="[row.random.getrandbits(63) for row in rows]",
        new="[rows[0].random.getrandbits(63) for row in rows]",
        tests=("tests/server/test_engines.py::test_samples_depend_on_the_seed_and_not_on_the_batch[torch]",),
    ),
    Exhibit(
        name="all_samples_of_a_prompt_are_one",
        source="UniRL #208, verl #6857, verl #2646",
        bug=(
            "All samples of a prompt had the same seed and were the same text, so every group had reward variance "
            "0 and advantage 0. With a filter of uniform groups the run merely throws all away; without it, it "
            "trains on nothing, and the loss is a plausible 0."
        ),
        cost="SGLang returns as many copies of one response.",
        symbol="generate_request",
        old='{"sampling_seed": first + k}',
        new='{"sampling_seed": first}',
        tests=("tests/unit/rollout/test_sglang_api.py::test_nothing_but_the_temperature_shapes_the_distribution",),
    ),
    Exhibit(
        name="the_same_noise_in_every_step",
        source="verl #2646 (variant)",
        bug=(
            "A seed in the sampling parameters was a constant, so whenever a prompt came again it was sampled "
            "with the same random numbers. Groups vary, but epochs do not explore anything new."
        ),
        cost="A prompt's responses differ from epoch to epoch only as far as the weights do.",
        symbol="Collector.collect",
        old='derive_seed(self.seed, "rollout", step, number)',
        new='derive_seed(self.seed, "rollout", number)',
        tests=("tests/unit/rollout/test_collector.py::test_each_step_samples_with_its_own_seed",),
    ),
    Exhibit(
        name="a_whole_budget_after_each_interruption",
        source="slime #2261",
        bug=(
            "A response that went on after an interruption got its full token budget again, so some responses "
            "were up to twice as long as the limit. Mean length drifts up, truncation looks rarer, overlong "
            "penalties do not fit."
        ),
        cost="Responses that are cut and go on may exceed rollout.max_response_tokens.",
        symbol="continuation",
        old="remaining = sampling.max_tokens - (len(tokens) - len(prompt.token_ids))",
        new="remaining = sampling.max_tokens",
        tests=("tests/unit/rollout/test_fleet.py::test_what_is_under_way_when_new_weights_come",),
    ),
    Exhibit(
        name="the_reference_replays_the_policys_experts",
        source="controller_scale.md 2 (replay_experts), own",
        bug=(
            "With replayed experts the reference policy was sent through the experts that the engine's policy had "
            "chosen: its log-probs are those of no model."
        ),
        cost=(
            "The KL to the reference is too small and has a wrong gradient direction in expert models under "
            "rollout.replay_experts."
        ),
        symbol="Actor.attach_ref_logprobs",
        old="self.logprobs(batch, replays=False)",
        new="self.logprobs(batch)",
        tests=("tests/parallel/test_expert_replay.py::test_own_choices_are_replayed_bit_for_bit_and_another_one_shows",),
    ),
    Exhibit(
        name="experts_of_the_mirrored_layer",
        source="controller_scale.md 2 (replay_experts), own",
        bug=("The k-th layer with experts has to get the k-th choice, over pipeline stages and dense layers in between."),
        cost="First and last layer exchange their experts. Right for a model with one such layer.",
        symbol="ExpertReplay.set",
        old="experts_SKT[:, k].long()",
        new="experts_SKT[:, -1 - k].long()",
        tests=("tests/parallel/test_expert_replay.py::test_given_experts_on_every_layout",),
    ),
    Exhibit(
        name="padding_of_the_vocabulary_gets_probability",
        source="gpu_readiness.md F12 (vocabularies that are no multiple of 16)",
        bug=("Megatron pads the vocabulary with rows of zeros, whose logits are 0: they take probability from real tokens."),
        cost=(
            "Log-probs are too small and entropies wrong wherever the vocabulary is padded, and padding gets "
            "gradients. Right where it is a multiple of 16 tp."
        ),
        symbol="VocabShard.of",
        old="columns = width if vocab_size is None else min(max(vocab_size - first, 0), width)",
        new="columns = width",
        tests=("tests/unit/ops/test_vocab_parallel.py::test_padded_columns_get_no_probability_and_no_gradient",),
    ),
    Exhibit(
        name="yarn_scales_scores_once",
        source="own comment in build.py (families)",
        bug="YaRN's factor is on queries and on keys, so scores have its square.",
        cost="Models with YaRN are computed with another temperature of attention. Others are right.",
        symbol="_softmax_scale",
        old="arch.rotary_table.attention_factor**2 / math.sqrt(arch.head_dim)",
        new="arch.rotary_table.attention_factor / math.sqrt(arch.head_dim)",
        tests=("tests/parallel/test_families.py::test_the_model_is_that_of_transformers",),
    ),
    Exhibit(
        name="the_same_places_are_drawn_in_every_step",
        source="controller_scale.md 13 (keys of weighting objectives)",
        bug="Clip-Cov draws tokens at random by keys that hang on step, update, sequence and place.",
        cost="The same places of the same sequences are favoured in every step of the run.",
        symbol="Actor._batch_statistics",
        old='derive_seed(self.cfg.seed, "weighting", self._step, batch.update)',
        new='derive_seed(self.cfg.seed, "weighting", batch.update)',
        tests=("tests/gate/test_covering.py",),
    ),
    Exhibit(
        name="old_and_rollout_log_probs_are_exchanged",
        source="own (the wiring of batch and objective was compared with itself)",
        bug=(
            "The log-probs of the engine and those of the old policy changed places on their way into the loss. They differ by "
            "rounding alone where the engine is exact, so ratios, corrections and curves look right."
        ),
        cost="The ratio is to the engine, and a correction (tis, mis, icepop) weighs by the inverse of the mismatch.",
        symbol="MinibatchInputs._inputs",
        old="""old_logprob_R=stats.logprob_R.detach() if logprobs is None else logprobs[token_R],
            old_entropy_R=stats.entropy_R.detach() if entropies is None else entropies[token_R],
            rollout_logprob_R=self._rollout_logprobs_N[token_R],""",
        new="""rollout_logprob_R=stats.logprob_R.detach() if logprobs is None else logprobs[token_R],
            old_entropy_R=stats.entropy_R.detach() if entropies is None else entropies[token_R],
            old_logprob_R=self._rollout_logprobs_N[token_R],""",
        tests=("tests/parallel/test_every_objective.py::test_every_row_trains_to_the_reference[1 rank-every row]",),
    ),
    Exhibit(
        name="only_the_first_part_of_the_rows_is_hashed",
        source="our own: CHANGELOG Changed (random keys of weightings are made on the device)",
        bug="Keys of tokens are computed for 262,144 rows at once. The rows after them keep the seed as their key.",
        cost="In larger batches all later tokens have one key: methods that draw tokens take all of them or none.",
        symbol="hash_rows",
        old="        part.bitwise_and_(0x7FFF_FFFF_FFFF_FFFF)\n",
        new="        part.bitwise_and_(0x7FFF_FFFF_FFFF_FFFF)\n        break\n",
        tests=("tests/unit/test_seeding.py::test_rows_that_are_hashed_in_parts_have_the_same_keys",),
    ),
)
