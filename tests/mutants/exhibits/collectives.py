"""Sums over the wrong ranks, without their gradient, or twice."""

from tests.mutants.exhibit import Exhibit

KIND = "collectives"
EXHIBITS = (
    Exhibit(
        name="hidden_gradient_summed_twice",
        source="slime #1748 (scale of gradients under SP and CP; Megatron-LM #673 and #906 are of that kind)",
        bug=(
            "Gradients were inflated by a factor of the parallel size in one part of the network only, under "
            "sequence or context parallelism. The loss is right, and the clipped gradient norm hides the rest."
        ),
        cost=(
            "With sequence parallelism (and without a budget for logits) the gradient that enters the decoder is "
            "tp times too large; the output layer's own is right."
        ),
        symbol="OutputRows.install",
        old="output_layer.disable_grad_reduce = True",
        new="output_layer.disable_grad_reduce = False",
        tests=("tests/parallel/test_layouts.py::test_shared_prompts",),
    ),
    Exhibit(
        name="sum_over_ranks_without_its_gradient",
        source="flash-attention #1244 (backward of an all-reduce; the same in PyTorch's plain all_reduce)",
        bug=(
            "A sum over ranks passed gradients straight through, although each rank's loss depends on all ranks' "
            "terms. Forward is right to the bit, so every comparison of losses passes."
        ),
        cost=(
            "Under cp > 1, where factors differ from token to token of a sequence (entropy in the advantage, "
            "steer, clip_cov, tis), a token's gradient lacks what the other ranks' tokens say of its sequence's "
            "ratio. TEPO without them takes the other path and is right."
        ),
        symbol="_AllReduceBothWays.backward",
        old=("        dist.all_reduce(grad, group=ctx.group)\n"),
        new="",
        tests=("tests/parallel/test_statistics.py::test_sequence_ratio_over_context_parallel_ranks",),
    ),
    Exhibit(
        name="gradients_are_never_reduced",
        source="minimind #853, NeMo-RL #3660",
        bug=(
            "The wrapper that reduces gradients was called past (or once per chunk instead of once per step), so "
            "ranks trained on their own data and drifted apart. Each rank's loss falls as it should; what it cost "
            "was all the compute of the other ranks."
        ),
        cost=(
            "No reduction over dp x cp, none of tied embeddings over stages, no division by the tokens: each rank "
            "steps its part of the optimizer with its own gradient, scaled by N, which Adam and the clipped norm "
            "hide."
        ),
        symbol="Actor.open",
        old="config.finalize_model_grads_func = finalize_model_grads",
        new="config.finalize_model_grads_func = None",
        tests=("tests/parallel/test_layouts.py::test_layout_equals_reference",),
    ),
    Exhibit(
        name="interleaved_pipeline_without_overlap",
        source="own comment in build.py (Megatron 0.16 over gloo)",
        bug=(
            "Interleaved 1F1B over gloo gave silently wrong activations unless both point-to-point switches were set together."
        ),
        cost="With vpp > 1 stages get activations of another microbatch or chunk. Losses are finite.",
        symbol="_mesh",
        old='"overlap_p2p_comm": parallel.vpp > 1,',
        new='"overlap_p2p_comm": False,',
        tests=("tests/parallel/test_layouts.py::test_layout_equals_reference",),
    ),
    Exhibit(
        name="shards_without_their_marks",
        source="own comment in build.py (Megatron-LM #7452 lists bugs of this kind)",
        bug=(
            "Without Megatron's initialisation parameters lose the mark that they are split over tp, and the "
            "gradient norm counts rank 0's shards only."
        ),
        cost="Under tp > 1 the norm is too small and clipping too weak. Weights are the checkpoint's either way.",
        symbol="own_fields",
        old='use_cpu_initialization=device.type == "cpu",',
        new=('use_cpu_initialization=device.type == "cpu",\n        perform_initialization=False,'),
        tests=("tests/parallel/test_layouts.py::test_layout_equals_reference",),
    ),
    Exhibit(
        name="all_factors_are_said_to_be_constant",
        source="own (collectives of the sequence ratio, CHANGELOG Added: the same numbers on every layout)",
        bug=(
            "The sequence ratio has a form without backward collective that is right only if advantage, weight "
            "and mask are the same on all tokens of a sequence."
        ),
        cost="With entropy inside the advantage and a sequence ratio the loss is right and the gradient is not.",
        symbol="Objective.has_constant_factors",
        old="self.advantage_alpha == 0",
        new="self.advantage_alpha is not None",
        tests=(
            "tests/unit/losses/test_objective_parity.py::test_entropy_in_the_advantage_reaches_the_gradient_of_a_sequence_ratio",
        ),
    ),
    Exhibit(
        name="the_hidden_gradient_of_one_shard",
        source="gpu_readiness.md F1 (the fused output layer)",
        bug=("The fused output layer has to sum the gradient of the hidden states over the vocabulary's shards itself."),
        cost=(
            "With training.logits_budget_mib, tp > 1 and no sequence parallelism every tensor-parallel rank "
            "trains its decoder with the gradient of its own columns."
        ),
        symbol="_OutputLayerStats.backward",
        old="dist.all_reduce(grad_hidden, group=ctx.summed_over)",
        new="pass",
        tests=(
            "tests/parallel/test_output_layer.py::test_fp32_equals_the_whole_logits_in_fp64",
            "tests/parallel/test_layouts.py::test_output_layer_in_chunks",
        ),
    ),
    Exhibit(
        name="the_teachers_maximum_is_that_of_one_shard",
        source="own (ops/token_statistics/teacher.py)",
        bug="Each rank's sum over the teacher's logits is relative to its own maximum, and is added as if all were equal.",
        cost="With tensor parallelism the KL to the teacher is off by a part that grows with the distance of the maxima.",
        symbol="combine_teacher",
        old="(weight * (crosses + shift * totals)).sum(0)",
        new="(weight * crosses).sum(0)",
        tests=("tests/parallel/test_distillation.py::test_one_collective_in_forward_and_none_in_backward",),
    ),
)
