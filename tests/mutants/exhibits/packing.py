"""Packed sequences see each other, or lie where attention does not expect them."""

from tests.mutants.exhibit import Exhibit

KIND = "packing"
EXHIBITS = (
    Exhibit(
        name="packed_sequences_see_each_other",
        source="prime-rl #3003",
        bug=(
            "Under context parallelism one layer type was given the made-up boundaries [0, total] instead of "
            "those of the packed documents, so its state went from one document into the next (differences of "
            "0.46 where 0.008 is rounding). Losses look normal: a language model profits from any text before."
        ),
        cost=(
            "A microbatch is one causal sequence: every token sees all sequences packed before its own. Right for "
            "one sequence in a microbatch."
        ),
        symbol="SDPACoreAttention._packed_layout",
        old='layout = self._layout(lengths, query_S, getattr(params, "starts", None))',
        new=(
            'one = [sum(lengths)] if getattr(params, "starts", None) is None else lengths\n'
            '            layout = self._layout(one, query_S, getattr(params, "starts", None))'
        ),
        tests=(
            "tests/parallel/test_attention.py::test_packed_sequences_match_plain_attention",
            "tests/parallel/test_actor.py::test_old_statistics_equal_transformers_on_every_layout",
        ),
    ),
    Exhibit(
        name="chunks_side_by_side_instead_of_zigzag",
        source="miles #1752",
        bug=(
            "The layout of the batch got lost on the way to the slicing for context parallelism, so advantages "
            "were cut for another layout than the tokens. Shapes fit either way."
        ),
        cost=(
            "All of our own code reads the layout here, so with our attention results stay right and only the "
            "balance is lost; Transformer Engine's attention expects zigzag and computes something else. An "
            "exhibit that is silent on a CPU on purpose."
        ),
        symbol="zigzag_chunks",
        old="(cp_rank, 2 * cp_size - 1 - cp_rank)",
        new="(2 * cp_rank, 2 * cp_rank + 1)",
        tests=(
            "tests/parallel/test_attention.py::test_zigzag_layout",
            "tests/unit/test_rotary.py::test_values_and_gradients_are_megatrons",
        ),
    ),
    Exhibit(
        name="positions_of_another_microbatch",
        source="CHANGELOG Fixed (share_prompts with recompute: full under a pipeline)",
        bug=(
            "Rotary positions of pieces behind a shared prompt were kept for the last microbatch alone; a "
            "pipeline recomputes an earlier one after later forward passes, and turned its queries and keys by "
            "wrong angles, in backward only."
        ),
        cost="With recompute=full, share_prompts and pp > 1 gradients are wrong while losses are right.",
        symbol="PackedRotary.start",
        old="self._starts[cu_seqlens] = starts",
        new=("self._starts.clear()\n        self._starts[cu_seqlens] = starts"),
        tests=("tests/gate/test_covering.py",),
    ),
    Exhibit(
        name="keys_of_a_piece_end_with_its_queries",
        source="own: packed attention without padding",
        bug=(
            "Each piece of a sequence attended to as many keys as it has queries, from the sequence's start. That is right "
            "for a sequence that one rank holds, and for the first piece of a split one."
        ),
        cost="Under context parallelism later pieces see only the beginning of their sequence.",
        symbol="PackedLayout.of",
        old="keys = (chunk_G[:, None] * (pieces + 1)).flatten()",
        new="keys = queries",
        tests=("tests/parallel/test_attention.py::test_packed_sequences_match_plain_attention",),
    ),
    Exhibit(
        name="backward_with_the_log_sum_exp_of_a_part",
        source="own: packed attention without padding",
        bug=(
            "The backward pass of responses over their shared prompt took the log-sum-exp of the responses' own keys instead "
            "of that of the whole softmax."
        ),
        cost="Outputs are right; gradients of shared prompts are too large.",
        symbol="_PackedAttention.forward",
        old="lse.index_copy_(1, rows, whole.T)",
        new="pass",
        tests=("tests/parallel/test_attention.py::test_responses_see_the_prompt_that_they_share",),
    ),
)
