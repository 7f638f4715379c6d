"""Rounding where there must be none."""

from tests.mutants.exhibit import Exhibit

KIND = "precision"
EXHIBITS = (
    Exhibit(
        name="log_probs_in_bf16",
        source="slime #245",
        bug=(
            "`rollout_log_probs` were stored in bf16. A log-prob of -3 is then off by up to 0.008, which is more "
            "than GSPO's clip range, and the difference of engine and trainer looked like a mismatch of kernels."
        ),
        cost="Rounded to 8 bits; the dtype that is checked stays fp32.",
        symbol="checked_rollout",
        old="rollout_logprobs_L=torch.from_numpy(logprobs_L),",
        new="rollout_logprobs_L=torch.from_numpy(logprobs_L).bfloat16().float(),",
        tests=("tests/server/test_engines.py::test_logprobs_are_those_of_transformers_after_temperature",),
    ),
    Exhibit(
        name="the_first_ratio_is_not_one",
        source="CHANGELOG Fixed (first update of a rollout batch)",
        bug=(
            "Old log-probs of a pass of their own, repeated under another packing, differ by bf16's rounding: a "
            "sequence's ratio moved by more than GSPO's clip range of 3e-4, so the first update was clipped at "
            "random, and dH was noise."
        ),
        cost=("In the first of several updates ratios are 1 only to rounding, and TEPO's KL mask picks tokens by noise."),
        symbol="MinibatchInputs._inputs",
        old="if self._batch.update == 0 and entropies is not None:",
        new="if self._batch.update < 0 and entropies is not None:",
        tests=("tests/parallel/test_old_statistics.py::test_the_first_updates_ratio_is_one_in_bf16_too",),
    ),
    Exhibit(
        name="integers_are_taken_for_weights",
        source="reliability_audit.md 9, CHANGELOG Fixed",
        bug=(
            "int8 tensors of a quantized model were cast to bf16 without their scales: a model of garbage in the right shapes."
        ),
        cost="Integers and FP8 are loaded as if they were values.",
        symbol="HfReader.get",
        old="if dtype not in _WEIGHT_DTYPES:",
        new='if dtype == "BOOL":',
        tests=("tests/unit/models/test_hf_files.py::test_a_tensor_that_a_cast_would_take_for_weights_is_refused_by_name",),
    ),
    Exhibit(
        name="the_router_rounds_like_bf16",
        source="own comment in build.py; gpu_readiness.md (found right: MoE in bf16)",
        bug=("The router's logits in bf16 choose other experts for a few tokens than those in fp32 that the engine has."),
        cost=(
            "In bf16 engine and actor disagree on experts more often than they must; the mismatch rises by what "
            "nobody can tell from kernels. In fp32 nothing changes."
        ),
        symbol="_mixture_of_experts",
        old='"moe_router_dtype": "fp32",',
        new='"moe_router_dtype": None,',
        tests=("tests/unit/test_precision.py::test_experts_are_chosen_in_fp32_whatever_the_precision",),
    ),
    Exhibit(
        name="the_weight_gradient_is_rounded_to_bf16",
        source="gpu_readiness.md F6",
        bug="Products of bf16 have to be added in fp32; rounding each chunk's product first loses the small ones.",
        cost="On a CPU in bf16 each chunk of rows is rounded to 8 bits before it is added.",
        symbol="add_product",
        old="total[at : at + CHUNK_COLUMNS].addmm_(piece.to(total.dtype), wide)",
        new="total[at : at + CHUNK_COLUMNS].add_(piece @ hidden)",
        tests=(
            "tests/unit/ops/test_add_product.py::test_a_product_is_added_in_the_type_of_the_sum",
            "tests/parallel/test_output_layer.py::test_bf16_weight_gradient_is_summed_in_fp32",
        ),
    ),
    Exhibit(
        name="gradients_are_reduced_in_bf16",
        source="gpu_readiness.md (found right: gradients are reduced in fp32)",
        bug="Summed over many ranks in bf16, small gradients vanish.",
        cost="In bf16 `main_grad` is bf16. In fp32 nothing changes.",
        symbol="ddp_fields",
        old='"grad_reduce_in_fp32": True,',
        new='"grad_reduce_in_fp32": False,',
        tests=("tests/unit/test_precision.py::test_a_preset_becomes_these_fields_of_data_parallelism_and_optimizer",),
    ),
    Exhibit(
        name="rewards_are_recorded_in_fp32",
        source="our own: CHANGELOG Added (recording and replay)",
        bug="Rewards are fp64 in the run that records them and fp32 in its recordings.",
        cost="A replay has other advantages in their last digits, and goes another way after some steps.",
        symbol="_NUMBERS",
        old='"reward": torch.float64',
        new='"reward": torch.float32',
        tests=("tests/unit/rollout/test_record.py::test_rollouts_and_metrics_come_back_bit_for_bit",),
    ),
)
