"""The policy on Megatron-Core: build it from a Hugging Face config, compute log-probs and entropies, update it."""
