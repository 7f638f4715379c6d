"""The schemas of datasets: recognized, reported, and refused where they are mixed; and how prompts become tokens."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tepo_megatron.base.errors import ConfigError, DataError
from tepo_megatron.data.schemas import gold, same_gold
from tests.datasets import load, text, write

CHAT = [{"role": "user", "content": "1+1?"}]
VERL = {
    "data_source": "math_dapo",
    "prompt": CHAT,
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 0},
}
SAMPLED = [*CHAT, {"role": "assistant", "content": r"so \boxed{2}"}]
OPEN_R1 = VERL | {"prompt": "1+1?", "solution": "2", "source_prompt": [{"role": "user", "content": "Solve: 1+1?"}]}


@pytest.mark.parametrize(
    ("row", "schema", "prompt"),
    [
        ({"prompt": "1+1?", "answer": 2}, "own (prompt, answer)", "1+1?"),
        (VERL, "verl (prompt, reward_model.ground_truth)", "u:1+1?|a:"),
        (VERL | {"solution": "worked out"}, "verl (prompt, reward_model.ground_truth)", "u:1+1?|a:"),
        (OPEN_R1, "open-r1 (prompt, solution)", "1+1?"),
        ({"prompt": CHAT, "label": "2"}, "slime (prompt, label)", "u:1+1?|a:"),
        ({"input": "1+1?", "output": "2"}, "NeMo-RL (input, output)", "1+1?"),
        (
            {"messages": [{"role": "system", "content": "S"}, *CHAT, {"role": "assistant", "content": "2"}], "task_name": "m"},
            "NeMo-RL messages (messages, messages)",
            "s:S|u:1+1?|a:",
        ),
        ({"messages": CHAT, "answer": 2}, "plain (messages, answer)", "u:1+1?|a:"),
        ({"problem": "1+1?", "answer": 2}, "plain (problem, answer)", "1+1?"),
        ({"problem": "1+1?", "solution": r"so \boxed{2}", "answer": "2"}, "plain (problem, answer)", "1+1?"),
        ({"problem": "1+1?", "answer": "2", "messages": SAMPLED}, "plain (problem, answer)", "1+1?"),
        ({"problem": "1+1?", "solution": r"It is $1+1=\boxed{2}$."}, "plain (problem, solution)", "1+1?"),
        ({"question": "1+1?", "answer": "One and one is 2.\n#### 2"}, "plain (question, answer)", "1+1?"),
        ({"question": "1+1?", "final_answer": ["2"]}, "plain (question, final_answer)", "1+1?"),
        ({"problem": "1+1?", "expected_answer": "2", "id": 1}, "plain (problem, expected_answer)", "1+1?"),
    ],
)
def test_every_schema_is_recognized(
    row: dict[str, object], schema: str, prompt: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    loaded = load(write(tmp_path / "d.jsonl", row), tokenizer)
    assert loaded.report.schema == schema
    assert [(text(tokenizer, p.token_ids), p.answer) for p in loaded.prompts] == [(prompt, "2")]


def test_a_key_that_is_given_finds_the_other(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "d.jsonl", OPEN_R1)
    (prompt,) = load(path, tokenizer, prompt_key="source_prompt", answer_key="solution").prompts
    assert text(tokenizer, prompt.token_ids) == "u:Solve: 1+1?|a:"
    loaded = load(path, tokenizer, answer_key="extra_info.index")
    assert loaded.report.schema == "keys (prompt, extra_info.index)" and loaded.prompts[0].answer == "0"
    loaded = load(path, tokenizer, prompt_key="source_prompt")
    assert loaded.report.schema == "keys (source_prompt, solution)" and loaded.prompts[0].answer == "2"


@pytest.mark.parametrize(
    ("columns", "key", "other"),
    [
        ({"problem": "1+2?", "answer": "3", "messages": SAMPLED}, "answer", "messages"),
        ({"problem": "1+2?", "answer": "3", "solution": r"so \boxed{2}"}, "answer", "solution"),
        ({"prompt": "1+2?", "solution": "3", "reward_model": {"ground_truth": "2"}}, "solution", "reward_model.ground_truth"),
        ({"messages": SAMPLED, "answer": "3"}, "messages", "answer"),
    ],
)
def test_columns_with_different_answers_are_refused_until_a_key_says_which(
    columns: dict[str, object], key: str, other: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The first row has one answer in both, as where a sampled solution is right."""
    path = write(tmp_path / "d.jsonl", {"problem": "1+1?", "prompt": "1+1?", "messages": SAMPLED, "answer": 2, "solution": "2"})
    path.write_bytes(path.read_bytes() + write(tmp_path / "more.jsonl", columns).read_bytes())
    with pytest.raises(DataError) as e:
        load(path, tokenizer) if "problem" in columns else load(tmp_path / "more.jsonl", tokenizer)
    assert f"{key!r} gives the answer" in str(e.value) and repr(other) in str(e.value)
    assert "set data.answer_key to the one that is right" in str(e.value)
    if key == "answer":
        (prompt,) = load(tmp_path / "more.jsonl", tokenizer, answer_key="answer").prompts
        assert prompt.answer == "3"


def test_mixed_schemas_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "d.jsonl", VERL, {"problem": "1+2?", "answer": 3})
    with pytest.raises(DataError) as e:
        load(path, tokenizer)
    assert str(e.value).startswith(f"{path}:2: key 'prompt' is missing (found: 'problem', 'answer')")
    assert f"{path}:1 is of the schema verl (prompt, reward_model.ground_truth), this row of plain (problem, answer)" in str(
        e.value
    )
    loaded = load(path, tokenizer, skip_bad_rows=True)
    assert len(loaded.prompts) == 1 and loaded.report.faults.count == 1


def test_prompts_that_ask_for_what_the_grader_does_not_read(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    asks = "The last line of your response should be of the form Answer: $Answer. 1+1?"
    path = write(tmp_path / "d.jsonl", VERL | {"prompt": [{"role": "user", "content": asks}]})
    (line,) = load(path, tokenizer).report.details()
    assert "1 prompts ask for a last line" in line and line.endswith("docs/data.md says what to do")
    assert load(path, tokenizer, instruction="Put it into \\boxed{}.").report.details() == []


def test_messages_end_with_the_answer(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    answered = [*CHAT, {"role": "assistant", "content": "2"}]
    path = write(tmp_path / "d.jsonl", {"messages": answered}, {"messages": CHAT})
    with pytest.raises(DataError, match=r"d\.jsonl:2: 'messages' must end with the assistant's message"):
        load(path, tokenizer)
    path = write(tmp_path / "d.jsonl", {"prompt": answered, "answer": 2})
    with pytest.raises(DataError, match=r"d\.jsonl:1: 'prompt' ends with the assistant's message"):
        load(path, tokenizer)
    (prompt,) = load(path, tokenizer, prompt_key="prompt", answer_key="prompt").prompts
    assert (text(tokenizer, prompt.token_ids), prompt.answer) == ("u:1+1?|a:", "2")


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (7, "7"),
        (0.5, "0.5"),
        (5e-05, "0.00005"),
        (1e16, "10000000000000000"),
        (Decimal("1E+3"), "1000"),
        ([12], "12"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"first \boxed{1}, so \boxed{2}.", "2"),
        (r"\boxed{cut off", r"\boxed{cut off"),
        ("work\n#### 1,234", "1,234"),
        ("#### 42", "42"),
        ("so it is 6. #### 6", "6"),
        ("#### 7\r\n", "7"),
        ("#### is no mark here\nbut a heading", "#### is no mark here\nbut a heading"),
    ],
)
def test_gold_answers(value: object, answer: str) -> None:
    assert gold(value, "answer") == answer


def test_an_empty_box_is_a_bad_answer() -> None:
    with pytest.raises(DataError, match="'answer' is blank"):
        gold(r"\boxed{}", "answer")


@pytest.mark.parametrize(
    ("data", "of_string", "of_chat"),
    [
        ({"instruction": "Box it."}, "1+1?<unk><unk>Box it.", "u:1+1?<unk><unk>Box it.|a:"),
        ({"instruction": ""}, "1+1?", "u:1+1?|a:"),
        ({"as_chat": True}, "u:1+1?|a:", "u:1+1?|a:"),
        ({"as_chat": True, "system_prompt": "S"}, "s:S|u:1+1?|a:", "s:S|u:1+1?|a:"),
        ({"as_chat": True, "template_kwargs": {"enable_thinking": False}}, "u:1+1?|a:-", "u:1+1?|a:-"),
        ({"as_chat": True, "template_kwargs": {"enable_thinking": True}}, "u:1+1?|a:", "u:1+1?|a:"),
    ],
)
def test_templates(
    data: dict[str, Any], of_string: str, of_chat: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    for prompt, expected in (("1+1?", of_string), (CHAT, of_chat)):
        path = write(tmp_path / "d.jsonl", {"prompt": prompt, "answer": 2})
        assert [text(tokenizer, p.token_ids) for p in load(path, tokenizer, **data).prompts] == [expected]


def test_a_chat_keeps_its_own_system_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"prompt": [{"role": "system", "content": "mine"}, *CHAT], "answer": 2},
        {"prompt": [{"role": "user", "content": "1+2?"}], "answer": 3},
    ]
    loaded = load(write(tmp_path / "d.jsonl", *rows), tokenizer, system_prompt="S")
    assert [text(tokenizer, p.token_ids) for p in loaded.prompts] == ["s:mine|u:1+1?|a:", "s:S|u:1+2?|a:"]
    for prompt in loaded.prompts:  # environments go on with these
        assert tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True).input_ids == [*prompt.token_ids]
    path = write(tmp_path / "s.jsonl", {"prompt": "1+1?", "answer": 2})
    assert not load(path, tokenizer).prompts[0].messages and load(path, tokenizer, as_chat=True).prompts[0].messages == CHAT


def test_settings_of_chats_that_would_do_nothing_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "d.jsonl", {"prompt": "1+1?", "answer": 2})
    for data in ({"system_prompt": "S"}, {"template_kwargs": {"enable_thinking": False}}):
        with pytest.raises(ConfigError, match=rf"data\.{next(iter(data))} is of chats, .*data\.as_chat=true"):
            load(path, tokenizer, **data)
    with pytest.raises(
        ConfigError, match=r"data\.template_kwargs\.thinking: the chat template of the tokenizer has no thinking"
    ):
        load(path, tokenizer, as_chat=True, template_kwargs={"thinking": False})
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, unk_token="<unk>")
    with pytest.raises(DataError, match=r"d\.jsonl:1: 'prompt' .*no chat template"):
        load(path, plain, as_chat=True)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        *(
            (a, b, True)
            for a, b in (
                *((r"\frac12", r"\frac{1}{2}"), (r"\dfrac{1}{2}", r"\tfrac12"), ("1/2", r"\frac{1}{2}"), ("-1/2", r"-\frac12")),
                *(("0.5", ".5"), ("2.0", "2"), ("$2$", "2"), ("1,000", "1000"), ("50%", r"50\%"), ("{2}", "2")),
                *((r"\sqrt2", r"\sqrt{2}"), ("x^2", "x^{2}"), (r"\left(1, 2\right)", "(1,2)"), ("A", "(A)")),
                *((r"\text{(B)}", "B"), (r"\textbf{(B)}", "B"), (r"\mathrm{yes}", "yes")),
                *(("x=3", "3"), ("x = 3", "$3$"), (r"x \in [1,2]", "[1, 2]")),
            )
        ),
        *(
            (a, b, False)
            for a, b in (
                *(("3", "4"), ("3", "-3"), ("0.5", "5"), ("A", "B"), ("(1,2)", "[1,2]"), ("x", "2x"), ("1/2", "0.5")),
                *(("x=3", "y=3"), ("x=3", "x=4"), ("x=3", "4"), ("x=1, x=2", "x=2"), ("x>3", "3"), ("(1)", "1")),
                *((r"\frac{1}{23}", r"\frac{12}{3}"), (r"\frac12", r"\frac21"), ("x^{12}", "x^12"), ("x^{2}3", "x^{23}")),
            )
        ),
    ],
)
def test_two_columns_may_spell_an_answer_in_their_ways(a: str, b: str, same: bool) -> None:
    assert same_gold(a, b) == same_gold(b, a) == same
