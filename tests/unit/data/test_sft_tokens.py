"""Learned and context tokens are those of the whole rendering, for each family of tokenizers; texts of messages stay texts.

The independent reading: Python writes the conversation, with special tokens whose names no message can spell; the offsets of
that tokenizer say which tokens begin in a turn. The tokenizer under test has the same ids under names that messages spell.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tepo_megatron.base.errors import DataError
from tepo_megatron.config import DataConfig, SftConfig
from tepo_megatron.data.rendering import Encoder
from tepo_megatron.trainer.sft.conversations import load_conversations
from tests.datasets import write

NAMES = ("<s>", "</s>", "<|im_start|>")
SECRET = ("\u2402b\u2403", "\u2402e\u2403", "\u2402i\u2403")
WORDS = ["one", "two", " ", "  ", "\n", "\n\n", "1+1", "=", "ä", "🙂", "日本", *NAMES, "<|im_", "end", "the", "</"]
CORPUS = [
    "one two the end 1+1=2 user assistant system\n\n the  one",
    "two ones, 日本 and ä: <s> </s> <|im_start|> im_end\n",
] * 8


def byte_level() -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    return core


def sentence_piece(normalizer: Any, pre_tokenizer: Any, unigram: bool = False) -> Tokenizer:
    """With byte fallback, as in Llama 2 and Mistral."""
    core = Tokenizer(models.Unigram() if unigram else models.BPE())
    replace = normalizers.Replace(" ", "▁")
    core.normalizer = replace if normalizer is None else normalizers.Sequence([normalizer, replace])
    kwargs: dict[str, Any] = {"vocab_size": 90, "show_progress": False, "special_tokens": ["<unk>"]}
    trainer = trainers.UnigramTrainer(unk_token="<unk>", **kwargs) if unigram else trainers.BpeTrainer(**kwargs)
    core.train_from_iterator(CORPUS, trainer)
    tree = json.loads(core.to_str())
    model = tree["model"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    if unigram:
        model["vocab"] += [[token, -20.0] for token in fallback]
    else:
        model["vocab"] |= {token: len(model["vocab"]) + i for i, token in enumerate(fallback)}
        model["unk_token"] = "<unk>"
    model["byte_fallback"] = True
    core = Tokenizer.from_str(json.dumps(tree))
    if pre_tokenizer is not None:
        core.normalizer, core.pre_tokenizer = None, pre_tokenizer
    return core


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "prefix space": lambda: sentence_piece(normalizers.Prepend("▁"), None),
    "no prefix": lambda: sentence_piece(None, None),
    "metaspace first": lambda: sentence_piece(None, pre_tokenizers.Metaspace("▁", "first", split=False)),
    "metaspace always": lambda: sentence_piece(None, pre_tokenizers.Metaspace("▁", "always", split=True)),
    "metaspace never": lambda: sentence_piece(None, pre_tokenizers.Metaspace("▁", "never", split=True)),
    "unigram": lambda: sentence_piece(None, pre_tokenizers.Metaspace("▁", "always", split=True), unigram=True),
}
# beginning of a message, its end, with {role}; and the same as a Jinja template
LAYOUTS = {
    "chatml": ("<|im_start|>{role}\n", "</s>\n"),
    "special token": ("{role}<|im_start|>", "</s>"),
    "llama": ("[{role}]", " </s>"),
    "plain": ("<s>{role}: \n", "</s> "),
}


def tokenizer(core: Tokenizer, names: tuple[str, ...], layout: str) -> Any:
    core = Tokenizer.from_str(core.to_str())
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=names[0], eos_token=names[1])
    made.add_special_tokens({"additional_special_tokens": [names[2]]})
    head, end = (json.dumps(part).replace("{role}", '" + m.role + "') for part in LAYOUTS[layout])
    prompt = json.dumps(LAYOUTS[layout][0].replace("{role}", "assistant"))
    made.chat_template = (
        f"{{% for m in messages %}}{{{{ {head} + m.content + {end} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {prompt} }}}}{{% endif %}}"
    )
    return made


def written(messages: list[dict[str, str]], layout: str, names: tuple[str, ...]) -> tuple[str, list[tuple[int, int]]]:
    text, turns = "", []
    for message in messages:
        head, end = LAYOUTS[layout]
        for name, secret in zip(NAMES, names, strict=True):
            head, end = head.replace(name, secret), end.replace(name, secret)
        begin = len(text) + len(head.format(role=message["role"]))
        text += head.format(role=message["role"]) + message["content"] + end
        if message["role"] == "assistant":
            turns.append((begin, len(text)))
    return text, turns


def conversation(random: random.Random) -> list[dict[str, str]]:
    """The assistant's texts begin with a letter: white space at their beginning may belong to the prompt's last token."""
    roles = [*(["system"] if random.random() < 0.3 else []), *["user", "assistant"] * random.randint(1, 3)]
    texts = ["".join(random.choices(WORDS, k=random.randint(1, 8))) for _ in roles]
    return [
        {"role": role, "content": f"w{text}" if role == "assistant" else text} for role, text in zip(roles, texts, strict=True)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_whole_rendering(tmp_path: Path, family: str, layout: str) -> None:
    core = FAMILIES[family]()
    mine, other = tokenizer(core, NAMES, layout), tokenizer(core, SECRET, layout)
    assert mine.convert_tokens_to_ids(list(NAMES)) == other.convert_tokens_to_ids(list(SECRET))
    source = random.Random(f"{family}/{layout}")
    chats = [conversation(source) for _ in range(25)]
    path = write(tmp_path / "rows.jsonl", *({"messages": chat} for chat in chats))
    found = load_conversations(str(path), SftConfig(), mine, [mine.eos_token_id], {}, False).conversations
    prompts = Encoder(mine, DataConfig(train="t")).encode([chat[:-1] for chat in chats])
    for chat, made, prompt in zip(chats, found, prompts, strict=True):
        text, turns = written(chat, layout, SECRET)
        whole = other(text, add_special_tokens=False, return_offsets_mapping=True)
        expected = [False] * len(whole.input_ids)
        for begin, end in turns:
            for i, (start, _) in enumerate(whole.offset_mapping):
                expected[i] |= begin <= start < end
                if expected[i] and start >= begin and whole.input_ids[i] == other.eos_token_id:
                    break
        assert made.token_ids_L.tolist() == whole.input_ids, chat
        assert made.learned_mask_L.tolist() == expected, chat
        opened, turns = written([*chat[:-1], {"role": "assistant", "content": ""}], layout, SECRET)
        assert list(prompt) == other(opened[: turns[-1][0]], add_special_tokens=False).input_ids, chat


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_and_a_response_are_one_text(tmp_path: Path, family: str) -> None:
    made = tokenizer(FAMILIES[family](), NAMES, "plain")
    path = write(tmp_path / "rows.jsonl", {"prompt": "1+1=", "response": "two"})
    (found,) = load_conversations(str(path), SftConfig(), made, [made.eos_token_id], {}, False).conversations
    whole = made("1+1=two", add_special_tokens=False)
    assert found.token_ids_L.tolist() == [*whole.input_ids, made.eos_token_id]
    assert found.learned_mask_L.tolist()[-2:] == [True, True] and not found.learned_mask_L[0]


def test_a_prompt_that_ends_in_a_space_is_refused(tmp_path: Path) -> None:
    made = tokenizer(FAMILIES["byte-level"](), NAMES, "plain")
    path = write(tmp_path / "rows.jsonl", {"prompt": "the ", "response": "one"})
    with pytest.raises(DataError, match="joins the end of the prompt and the beginning of the turn to one token, ' one'"):
        load_conversations(str(path), SftConfig(), made, [made.eos_token_id], {}, False)
