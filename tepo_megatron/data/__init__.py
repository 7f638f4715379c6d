"""Datasets: read prompts from the common row schemas, stream them to the rollouts, and load the tokenizer."""

from tepo_megatron.data.mixture import Data, load_data
from tepo_megatron.data.prompts import LoadedPrompts, load_prompts
from tepo_megatron.data.stream import PromptStream
from tepo_megatron.data.tokenizer import decoder_file, load_tokenizer, stop_tokens, text_functions

__all__ = [
    "Data", "LoadedPrompts", "PromptStream", "decoder_file", "load_data", "load_prompts", "load_tokenizer", "stop_tokens",
    "text_functions",
]  # fmt: skip
