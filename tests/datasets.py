"""Small datasets and a tokenizer for them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tepo_megatron.config import DataConfig
from tepo_megatron.data import LoadedPrompts, load_prompts

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user'] %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "{{ m.role[0] + ':' + m.content + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}{{ '-' }}{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, and a beginning-of-sequence token that must never be added."""
    vocabulary = {c: i for i, c in enumerate(["<bos>", "<unk>", *map(chr, range(32, 127))])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", unk_token="<unk>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def text(tokenizer: PreTrainedTokenizerFast, token_ids: tuple[int, ...]) -> str:
    """Return the tokenized text, with line ends as <unk>."""
    return "".join(tokenizer.convert_ids_to_tokens(list(token_ids)))


def write(path: Path, *rows: object) -> Path:
    """Write rows as JSON lines; bytes are written unchanged."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def load(path: Path | str, tokenizer: PreTrainedTokenizerFast, **data: Any) -> LoadedPrompts:
    """Read one set as the config says."""
    cfg = DataConfig(train=str(path), **data)
    return load_prompts(cfg.sets[0], cfg, tokenizer)
