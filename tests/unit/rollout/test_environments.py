"""Environments: their observations are turns of the user for a chat and text for a string, and they are closed always."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import DataConfig, LimitsConfig
from tepo_megatron.data import text_functions
from tepo_megatron.data.rendering import Encoder
from tepo_megatron.rollout.chat import ChatFormat
from tepo_megatron.rollout.custom import CustomRollouts, load_function
from tests.unit.rollout.test_gateway import CHATML, Scripted, tokenizer

ENVIRONMENT = """
import asyncio, pathlib
from tepo_megatron.rollout.environment import EnvironmentStep, play

class Repeats:
    async def reset(self, prompt):
        return {first!r}
    async def step(self, action):
        if action == "raise":
            raise ValueError("no such move")
        if action == "hang":
            await asyncio.sleep(60)
        return EnvironmentStep("" if action == "skip" else f"saw {{action}}<|im_end|>", 0.5, action == "end")
    async def close(self):
        await asyncio.sleep(0)
        pathlib.Path(__file__).with_name("closed").open("a").write("closed ")

environment = play(Repeats)
"""
ALTERNATING = (  # in the manner of Mistral's, which ends only turns of the model and refuses two turns of the user in a row
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.index0 % 2 and messages[0].role == 'user' %}{{ raise_exception('two users in a row') }}{% endif %}"
    "[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
OTHER_END = CHATML.replace("<|im_end|>", "<|end|>")  # in the manner of Gemma's: no turn ends with the end of a text
TWO_ENDS = CHATML.replace("<|im_end|>", "{% if m.role == 'assistant' %}<|end|>{% endif %}<|im_end|>")  # as Cohere's
THINKING = CHATML.replace(
    "assistant\n{% endif %}", "assistant\n{% if enable_thinking is defined %}<think></think>{% endif %}{% endif %}"
)
TOKENIZER = tokenizer(None)
SPLIT = [5 + string.printable.index("a"), 5 + string.printable.index("b")]  # encoding its text would merge the two


def played(
    folder: Path,
    turns: Sequence[str | list[int]],
    prompt: Any = "hi",
    *,
    template: str | None = CHATML,
    first: str = "",
    **more: Any,
) -> tuple[Rollout, ChatFormat]:
    """Return the sample of an episode in which the model writes `turns`."""
    (folder / "played.py").write_text(ENVIRONMENT.format(first=first))
    made, kwargs = tokenizer(template), more.get("template_kwargs", {})
    chat = ChatFormat(made, *text_functions(made), kwargs)
    encoder = Encoder(made, DataConfig(train="unused", template_kwargs=kwargs))
    (token_ids,) = encoder.encode([prompt])
    assert isinstance(token_ids, tuple)
    engine = Scripted(chat, [list(chat.encode(turn)) if isinstance(turn, str) else turn for turn in turns])
    function = load_function(f"{folder / 'played.py'}:environment")
    limits = LimitsConfig(seconds=more.get("seconds", 20.0))
    with CustomRollouts(engine, function, chat.encode, chat.decode, limits=limits, chat=chat) as custom:
        asked = Prompt(7, token_ids, "9", messages=prompt if isinstance(prompt, list) else ())
        (rollout,) = custom.generate([asked], SamplingParams(1, 1.0, more.get("max_tokens", 400), (0, 2)), seed=0)
    return rollout, chat


def pieces(rollout: Rollout) -> list[str]:
    """Return the texts of the sample, with special tokens: the context, the model's turn, the context, ..."""
    texts, mask, ids = [], rollout.response_mask_L.tolist(), rollout.token_ids_L.tolist()
    for place in range(len(ids)):
        if place == 0 or mask[place] != mask[place - 1]:
            texts.append("")
        texts[-1] += TOKENIZER.decode([ids[place]], skip_special_tokens=False)
    return texts


SYSTEM, USER = {"role": "system", "content": "play"}, {"role": "user", "content": "hi"}
OPEN = "<|im_start|>assistant\n"
TURN = f"\n<|im_start|>user\nsaw ab<|im_end|><|im_end|>\n{OPEN}"
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {  # -> the texts that the model did not write
    "a chat": ({"prompt": [USER]}, [f"<|im_start|>user\nhi<|im_end|>\n{OPEN}", TURN]),
    "a chat, with a first observation": (
        {"prompt": [SYSTEM, USER], "first": "board"},
        [f"<|im_start|>system\nplay<|im_end|>\n<|im_start|>user\nhi\n\nboard<|im_end|>\n{OPEN}", TURN],
    ),
    "rules, with a first observation": (
        {"prompt": [SYSTEM], "first": "board"},
        [f"<|im_start|>system\nplay<|im_end|>\n<|im_start|>user\nboard<|im_end|>\n{OPEN}", TURN],
    ),
    "a template that alternates": (
        {"prompt": [USER], "template": ALTERNATING, "first": "board"},
        ["[INST]hi\n\nboard[/INST]", "[INST]saw ab<|im_end|>[/INST]"],
    ),
    "a template with another end of turns": (
        {"prompt": [USER], "template": OTHER_END, "end": "<|end|>"},
        [f"<|im_start|>user\nhi<|end|>\n{OPEN}", f"\n<|im_start|>user\nsaw ab<|im_end|><|end|>\n{OPEN}"],
    ),
    "a template that ends the model's turns with two tokens": (
        {"prompt": [USER], "template": TWO_ENDS, "end": "<|end|><|im_end|>"},
        [f"<|im_start|>user\nhi<|im_end|>\n{OPEN}", TURN],
    ),
    "arguments of the template": (
        {"prompt": [USER], "template": THINKING, "template_kwargs": {"enable_thinking": False}},
        [f"<|im_start|>user\nhi<|im_end|>\n{OPEN}<think></think>", f"{TURN}<think></think>"],
    ),
    "a string": ({"prompt": "hi", "first": "board"}, ["hiboard", "saw ab<|im_end|>"]),
    "a string, without a template": ({"prompt": "hi", "template": None}, ["hi", "saw ab<|im_end|>"]),
}


@pytest.mark.parametrize("case", CASES)
def test_observations_are_turns_of_the_user_for_a_chat_and_text_for_a_string(tmp_path: Path, case: str) -> None:
    arguments, context = CASES[case]
    arguments = dict(arguments)
    end = arguments.pop("end", "<|im_end|>")
    turns = [[*SPLIT, *TOKENIZER(end, add_special_tokens=False).input_ids], "end" + end]
    rollout, chat = played(tmp_path, turns, **arguments)
    assert not rollout.failure and rollout.reward == 1.0
    assert pieces(rollout) == [context[0], "ab" + end, context[1], "end" + end]
    sampled = rollout.token_ids_L[rollout.response_mask_L].tolist()
    assert sampled == [*turns[0], *chat.encode(turns[1])]  # as they were sampled
    spelled = [i for i, token in enumerate(rollout.token_ids_L.tolist()) if token == 2 and not rollout.response_mask_L[i]]
    of_template = sum(text.count("<|im_end|>") for text in context) - 1
    assert len(spelled) == (of_template if isinstance(arguments["prompt"], list) else 1)  # in a chat, observations are text


def test_a_turn_without_an_observation(tmp_path: Path) -> None:
    rollout, _ = played(tmp_path, ["skip<|im_end|>", "end<|im_end|>"], [USER])
    assert pieces(rollout)[2] == f"\n<|im_start|>user\n<|im_end|>\n{OPEN}"
    rollout, _ = played(tmp_path, ["skip<|im_end|>", "end<|im_end|>"])
    assert pieces(rollout) == ["hi", "skip<|im_end|>end<|im_end|>"]


def test_the_first_observation_counts_towards_the_response(tmp_path: Path) -> None:
    """Prompt and response together stay within what the servers and ranks were made for."""
    rollout, chat = played(tmp_path, [[9] * 400], [USER], first="board", max_tokens=30)
    before = len(chat.start([USER], ()))
    assert rollout.token_ids_L.numel() == before + 30 and rollout.response_mask_L.sum() == 30 - len("\n\nboard")
    rollout, _ = played(tmp_path, [[9]], [USER], first="board" * 9, max_tokens=30)
    assert "append less before it than rollout.max_response_tokens=30" in rollout.failure


ENDS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "done": (["end<|im_end|>"], {}, ""),
    "error": (["raise<|im_end|>"], {}, "ValueError: no such move"),
    "out of tokens": (["a"], {"max_tokens": 12}, ""),
    "cancelled": (["hang<|im_end|>"], {"seconds": 0.3}, "timed out after rollout.limits.seconds"),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_environment_is_closed_once_however_it_ends(tmp_path: Path, end: str) -> None:
    turns, limits, failure = ENDS[end]
    rollout, _ = played(tmp_path, turns, [USER], **limits)
    assert failure in rollout.failure and bool(rollout.failure) == bool(failure)
    assert (tmp_path / "closed").read_text() == "closed "
