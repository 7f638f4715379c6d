"""Tensor operations of RL post-training: vocabulary-parallel statistics, sums over sequences, packing, context parallelism."""
