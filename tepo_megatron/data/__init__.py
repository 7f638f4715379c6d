"""Datasets: prompts from JSON lines, the stream that feeds the rollouts, the tokenizer."""

from tepo_megatron.data.prompts import load_prompts
from tepo_megatron.data.stream import PromptStream
from tepo_megatron.data.tokenizer import load_tokenizer, stop_tokens

__all__ = ["PromptStream", "load_prompts", "load_tokenizer", "stop_tokens"]
