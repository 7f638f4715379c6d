"""The gated delta rule computes something else than the engine, and nothing says so."""

from tests.mutants.exhibit import Exhibit

_SOURCE = "own: issue 25 (the gated delta rule)"

KIND = "linear attention"
EXHIBITS = (
    Exhibit(
        name="the_state_goes_on_into_the_next_sequence",
        source="prime-rl #3003 (the layer type of that bug)",
        bug="The state of the delta rule is kept at the border of two packed sequences.",
        cost=(
            "Every sequence but the first of a microbatch reads what the sequences before it wrote. Right for one sequence in "
            "a microbatch, and the loss looks normal."
        ),
        symbol="GatedDeltaNet._layout",
        old="LinearLayout.of(tuple(cu_seqlens.diff().tolist()), cp, device)",
        new="LinearLayout.of((int(cu_seqlens[-1]),), cp, device)",
        tests=("tests/parallel/test_hybrid_layouts.py::test_layout_equals_reference[1 rank]",),
    ),
    Exhibit(
        name="the_convolution_reaches_into_the_sequence_before",
        source=_SOURCE,
        bug="The convolution of a sequence's first three tokens takes the last tokens of the sequence packed before it.",
        cost="Three tokens of each prompt are a little wrong, depending on the neighbour; the engine's are right.",
        symbol="packed_convolution",
        old="inside = (position_T[back:] >= back)[:, None]",
        new="inside = (position_T[back:] >= 0)[:, None]",
        tests=("tests/unit/ops/test_gated_delta_rule.py::test_nothing_crosses_the_border_of_two_sequences",),
    ),
    Exhibit(
        name="the_gated_norms_gradient_is_of_one_ranks_heads",
        source=_SOURCE,
        bug=(
            "Megatron sums the gradients of replicated parameters over tensor-parallel ranks under sequence parallelism, and "
            "of norms with two names without it. The norm of the delta rule is neither, and each rank has the gradient of its "
            "heads."
        ),
        cost="With tp > 1 and no sequence parallelism the ranks' copies of the norm drift apart. The loss is right at first.",
        symbol="GatedDeltaNet.__init__",
        old="self.sums_norm_gradient = tp > 1 and not config.sequence_parallel",
        new="self.sums_norm_gradient = False",
        tests=("tests/parallel/test_hybrid_layouts.py::test_layout_equals_reference[TP2]",),
    ),
    Exhibit(
        name="the_scan_reads_tokens_in_the_order_of_the_ranks",
        source=_SOURCE,
        bug="Tokens gathered from context-parallel ranks are scanned in the order of the ranks, not of the sequences.",
        cost="Under cp > 1 the state reads the zigzag's chunks 0, 3, 1, 2. All shapes fit, and without cp nothing is wrong.",
        symbol="LinearLayout.of",
        old="torch.cat([zigzag_rows(starts, cp, rank) for rank in range(cp)]).to(device) if cp > 1 else None",
        new="torch.arange(int(starts[-1])).to(device) if cp > 1 else None",
        tests=(
            "tests/unit/test_linear_attention.py::test_the_tokens_of_the_ranks_are_put_in_order",
            "tests/parallel/test_hybrid_layouts.py::test_layout_equals_reference[CP2]",
        ),
    ),
    Exhibit(
        name="decays_are_rounded_to_bf16",
        source=_SOURCE,
        bug="A_log has the dtype of the model, while engines keep it in fp32.",
        cost=(
            "exp(A_log) multiplies the decay of every token, so 2^-9 of it is an error of a percent after some tokens. Trainer "
            "and engine differ by more than bf16 explains, and updates below half a unit in the last place are lost."
        ),
        symbol="GatedDeltaNet.__init__",
        old="self.A_log = Parameter(torch.empty(heads, dtype=torch.float32))",
        new="self.A_log = Parameter(torch.empty(heads, dtype=config.params_dtype))",
        tests=("tests/unit/test_linear_attention.py::test_what_no_precision_rounds",),
    ),
    Exhibit(
        name="an_fp32_parameter_gets_the_master_of_another",
        source=_SOURCE + "; Megatron's own index counts that way",
        bug="A group of Adam has fp32 parameters first, and the index of a parameter counts in the order of the buffers.",
        cost=(
            "A checkpoint of a bf16 model with fp32 parameters has masters and moments of other parameters where sizes are "
            "equal; elsewhere it cannot be written."
        ),
        symbol="_mains",
        old="yield from zip((*whole, *half), group[\"params\"], strict=True)",
        new="yield from zip((*half, *whole), group[\"params\"], strict=True)",
        tests=("tests/parallel/test_checkpoint.py::test_on_the_same_layout_it_goes_on_bit_for_bit",),
    ),
)  # fmt: skip
