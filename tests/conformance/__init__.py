"""A conformance kit: any loss function against the fp64 reference, over ragged batches, layouts and extremes.

    python -m tests.conformance my_package.losses:grpo --as grpo --set clip_high=0.2

`parts.Part` is what the function is given, and what it returns; `adapters/` are examples. It needs torch alone.
"""
