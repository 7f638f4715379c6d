"""A tokenizer that tests only read."""

import pytest
from transformers import PreTrainedTokenizerFast

from tests.datasets import character_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()
