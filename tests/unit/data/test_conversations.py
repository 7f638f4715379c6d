"""Rows become conversations: the learned tokens are those that the policy would choose, in every schema that users have."""

import json
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.base.errors import ConfigError, DataError
from tepo_megatron.config import SftConfig
from tepo_megatron.config.io import validate
from tepo_megatron.trainer.sft.conversations import LoadedConversations, load_conversations
from tepo_megatron.trainer.sft.settings import supervised
from tests.datasets import character_tokenizer, text, write

# `#` begins a turn and `|` ends it; the space after it is nobody's
TEMPLATE = "{% for m in messages %}#{{ m.role[0] }}:{{ m.content }}| {% endfor %}{% if add_generation_prompt %}#a:{% endif %}"
CHAT = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
LONGER = [*CHAT, {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]


@pytest.fixture
def tokenizer() -> Any:
    made = character_tokenizer()
    made.eos_token, made.chat_template = "|", TEMPLATE
    return made


def load(tmp_path: Path, tokenizer: Any, *rows: Any, skip: bool = False, **cfg: Any) -> LoadedConversations:
    path = write(tmp_path / "rows.jsonl", *rows)
    return load_conversations(str(path), SftConfig(**cfg), tokenizer, [tokenizer.eos_token_id], {}, skip)


def texts(found: LoadedConversations, tokenizer: Any) -> list[tuple[str, str]]:
    """Return all tokens and the learned ones of each conversation, as text."""

    def written(ids: Any) -> str:
        return text(tokenizer, tuple(ids.tolist()))

    return [(written(c.token_ids_L), written(c.token_ids_L[c.learned_mask_L])) for c in found.conversations]


@pytest.mark.parametrize(
    ("row", "whole", "learned"),
    [
        ({"prompt": "1+1=", "response": "2"}, "1+1=2|", "2|"),
        ({"question": "1+1=", "answer": "2|"}, "1+1=2|", "2|"),
        ({"instruction": "Add.", "input": "", "output": "2"}, "Add.2|", "2|"),
        ({"messages": CHAT}, "#u:1+1| #a:2| ", "2|"),
        ({"prompt": CHAT[:1], "completion": "2"}, "#u:1+1| #a:2| ", "2|"),
        ({"messages": LONGER}, "#u:1+1| #a:2| #u:2+2| #a:4| ", "2|4|"),
        ({"messages": LONGER[:3]}, "#u:1+1| #a:2| ", "2|"),
        ({"conversations": [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]}, "#u:1+1| #a:2| ", "2|"),
        ({"messages": [{"role": "system", "content": "s"}, *CHAT]}, "#s:s| #u:1+1| #a:2| ", "2|"),
        ({"messages": CHAT, "system": "s", "tools": [], "history": None}, "#s:s| #u:1+1| #a:2| ", "2|"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, "#u:1+1| #a:2| ", "2|"),
        ({"prompt": LONGER[:3], "completion": "4"}, "#u:1+1| #a:2| #u:2+2| #a:4| ", "4|"),
        ({"messages": [*CHAT[:1], {**CHAT[1], "weight": 0}, *LONGER[2:]]}, "#u:1+1| #a:2| #u:2+2| #a:4| ", "4|"),
        ({"messages": [*LONGER[:3], {**LONGER[3], "train": False}]}, "#u:1+1| #a:2| ", "2|"),
        (
            {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2", "loss": None, "weight": 1.0}]},
            "#u:1| #a:2| ",
            "2|",
        ),
    ],
    ids=str,
)
def test_schemas(tmp_path: Path, tokenizer: Any, row: dict[str, Any], whole: str, learned: str) -> None:
    assert texts(load(tmp_path, tokenizer, row), tokenizer) == [(whole, learned)]


def test_instruction_and_input_are_one_prompt(tmp_path: Path, tokenizer: Any) -> None:
    found = load(tmp_path, tokenizer, {"instruction": "Add.", "input": "1+1", "output": "2"})
    assert texts(found, tokenizer) == [("Add.<unk><unk>1+12|", "2|")]


def test_the_last_turn_alone(tmp_path: Path, tokenizer: Any) -> None:
    found = load(tmp_path, tokenizer, {"messages": LONGER}, train_on="last")
    assert texts(found, tokenizer) == [("#u:1+1| #a:2| #u:2+2| #a:4| ", "4|")]


def test_keys_of_the_config(tmp_path: Path, tokenizer: Any) -> None:
    row = {"a": {"q": "1+1=", "r": "2"}, "prompt": "no", "response": "no"}
    assert texts(load(tmp_path, tokenizer, row, prompt_key="a.q", response_key="a.r"), tokenizer) == [("1+1=2|", "2|")]
    assert texts(load(tmp_path, tokenizer, {"turns": CHAT}, prompt_key="turns"), tokenizer)[0][1] == "2|"


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_only_the_last_is_learned(
    tmp_path: Path, tokenizer: Any
) -> None:
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else '' }}"
    )
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the chat template writes message 1 in another way.*train_on=last"):
        load(tmp_path, tokenizer, {"messages": LONGER})
    assert texts(load(tmp_path, tokenizer, {"messages": LONGER}, train_on="last"), tokenizer)[0][1] == "4|"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "a"}, "no chat and no prompt with a response in these keys: 'text'"),
        ({"prompt": "a", "response": 3}, "must be two strings or two lists of messages, not a number: 3"),
        ({"messages": CHAT[:1]}, "needs a message of the assistant that follows another one"),
        ({"messages": CHAT[1:]}, "needs a message of the assistant that follows another one"),
        ({"messages": [{"role": "user"}]}, "must be a list of messages with string 'role' and 'content'"),
        ({"conversations": [{"from": "robot", "value": "a"}]}, "has a message from 'robot'"),
        ({"prompt": "", "response": "a"}, "begins with a token to learn"),
        (b"{", "not valid JSON"),
        ({"prompt": "a", "response": "b", "system": "s"}, "has 'system', and its prompt is a string"),
        ({"instruction": "a", "context": "c", "response": "b"}, "has 'context', and its prompt is a string"),
        ({"messages": CHAT, "history": [["a", "b"]]}, "has 'history', which is not read"),
        ({"messages": CHAT, "tools": [{"name": "add"}]}, "has 'tools', which the chat template does not write"),
        ({"messages": CHAT, "tools": "{"}, "'tools' is not valid JSON"),
        ({"messages": [{"role": "system", "content": "s"}, *CHAT], "system": "t"}, "has 'system' and another message of the"),
        (
            {"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]},
            "message 1 has 'weight': 0.5; a turn is learned (1, true) or not",
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "reasoning_content": "t"}]},
            "'reasoning_content', which the chat template does not",
        ),
        ({"messages": [{**CHAT[0], "train": True}, CHAT[1]]}, "message 0 of the user has 'train': true"),
        ({"messages": [CHAT[0], {**CHAT[1], "train_detail": [{}]}]}, "message 1 has 'train_detail', which is not read"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, "has no turn to learn"),
    ],
    ids=str,
)
def test_rows_that_cannot_be_used(tmp_path: Path, tokenizer: Any, row: Any, why: str) -> None:
    with pytest.raises(DataError) as e:
        load(tmp_path, tokenizer, row)
    assert why in str(e.value) and "rows.jsonl:1" in str(e.value) and "data.skip_bad_rows=true" in str(e.value)
    found = load(tmp_path, tokenizer, row, {"prompt": "1+1=", "response": "2"}, skip=True)
    assert len(found.conversations) == 1 and "1 that cannot be used" in found.line


def test_a_turn_without_a_stop_token_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE.replace("| ", "; ")
    with pytest.raises(DataError, match=r"none of the model's stop tokens.*rollout\.stop_token_ids"):
        load(tmp_path, tokenizer, {"messages": CHAT})
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        load(tmp_path, tokenizer, {"messages": CHAT})


def test_long_conversations_are_dropped_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "1+1=", "response": "2"}, {"prompt": "1+1=", "response": "2" * 90}]
    found = load(tmp_path, tokenizer, *rows, max_tokens=40)
    assert len(found.conversations) == 1 and "1 longer than sft.max_tokens=40" in found.line
    assert "1 conversations, 2 tokens to learn" in found.line
    with pytest.raises(DataError, match=r"no conversation left: 1 are longer than sft\.max_tokens=40; raise it"):
        load(tmp_path, tokenizer, rows[1], max_tokens=40)
    with pytest.raises(DataError, match="it has no rows"):
        load(tmp_path, tokenizer)


def test_sections_of_rl_are_left_out() -> None:
    tree = {
        "name": "a", "model": {"path": "m"}, "data": {"train": "t", "max_prompt_tokens": 9000, "template_kwargs": {"x": 1}},
        "rollout": {"temperature": 0.7, "colocate": True, "stop_token_ids": [3]}, "sync": {"transport": "ipc"},
        "training": {"epochs": 3, "max_tokens_per_microbatch": 8192, "stream": "arrival"},
        "sft": {"data": "c", "max_tokens": 512}, "checkpoint": {"every": 5, "keep_best": True},
    }  # fmt: skip
    cfg = validate(supervised(tree))
    assert cfg.rollout.temperature == 1.0 and not cfg.rollout.colocate and cfg.sequence_tokens == 512
    assert cfg.rollout.stop_token_ids == [3] and cfg.data.template_kwargs == {"x": 1}
    assert cfg.training.max_tokens_per_microbatch == 8192 and cfg.training.stream == "off" and cfg.training.epochs == 1
    with pytest.raises(ConfigError, match=r"sft\.data is not set"):
        supervised({**tree, "sft": {}})
    with pytest.raises(ConfigError, match=r"max_tokens_per_microbatch=8192 cannot hold one sequence of 9000"):
        validate(supervised({**tree, "sft": {"data": "c", "max_tokens": 9000}}))


def test_tools_and_calls_without_content_are_written_by_the_template(tmp_path: Path, tokenizer: Any) -> None:
    """OpenAI's form: `content` is null and the arguments are JSON; the template gets an empty text and an object."""
    tokenizer.chat_template = (
        "{% if tools %}{{ tools[0].name }};{% endif %}{% for m in messages %}#{{ m.role[0] }}:{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}={{ c.function.arguments.a }}{% endfor %}| {% endfor %}"
        "{% if add_generation_prompt %}#a:{% endif %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    row = {"messages": [CHAT[0], call, {"role": "tool", "content": "2"}, CHAT[1]], "tools": json.dumps([{"name": "add"}])}
    assert texts(load(tmp_path, tokenizer, row), tokenizer) == [("add;#u:1+1| #a:add=1| #t:2| #a:2| ", "add=1|2|")]
