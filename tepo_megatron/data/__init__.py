"""Datasets: read prompts from the common row schemas, stream them to the rollouts, and load the tokenizer."""

from tepo_megatron.data.prompts import LoadedPrompts, load_prompts
from tepo_megatron.data.stream import Data, PromptStream, load_data
from tepo_megatron.data.tokenizer import (
    decoder_file,
    load_tokenizer,
    refuse_changes,
    stop_tokens,
    text_functions,
    tokenizer_digests,
)

__all__ = [
    "Data", "LoadedPrompts", "PromptStream", "decoder_file", "load_data", "load_prompts", "load_tokenizer",
    "refuse_changes", "stop_tokens", "text_functions", "tokenizer_digests",
]  # fmt: skip
