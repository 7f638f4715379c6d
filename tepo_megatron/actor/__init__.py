"""The policy on Megatron-Core: built from a Hugging Face config, asked for log-probs and entropies, updated."""
