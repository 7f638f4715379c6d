"""One agent, unchanged, against vLLM's own OpenAI server and against the gateway in front of the same server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.base.user_file import UserFunction
from tepo_megatron.data import text_functions
from tepo_megatron.rollout.agent import AgentTask
from tepo_megatron.rollout.chat import ChatFormat
from tepo_megatron.rollout.custom import CustomRollouts, load_function
from tests.server.served import EOS, MAX_LOGPROB_DIFF, Served, call, logprob_diff, serve
from tests.tiny import CHARACTERS, VOCAB_SIZE, char_tokenizer, tiny_qwen3

pytestmark = [pytest.mark.server, pytest.mark.full]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}. {{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}assistant. {% endif %}"
)
AGENT = """
from openai import AsyncOpenAI
from tepo_megatron.rollout.agent import AgentTask, openai_agent
SEEN = []  # (content, reason, prompt tokens, completion tokens) of each answer

@openai_agent
async def agent(task: AgentTask) -> float:
    chat = [{"role": "system", "content": "count"}, {"role": "user", "content": task.prompt}]
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0, timeout=60) as client:
        assert task.model in [model.id async for model in client.models.list()]
        for words in ("more", "and then?", "why (1+1)?", ""):
            answer = await client.chat.completions.create(
                model=task.model, messages=chat, max_tokens=12, temperature=0, stop="z" if words == "more" else None,
                extra_body={"include_stop_str_in_output": True},
            )
            choice = answer.choices[0]
            SEEN.append((choice.message.content, choice.finish_reason, *usage_of(answer)))
            chat += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": words}]
        parts = [part async for part in await client.chat.completions.create(
            model=task.model, messages=chat, max_tokens=12, temperature=0, stream=True
        )]
        SEEN.append("".join(part.choices[0].delta.content or "" for part in parts))
    return 1.0

def usage_of(answer):
    return answer.usage.prompt_tokens, answer.usage.completion_tokens
"""
TURNS = 5
PROMPTS = ("1+2=", "(3*4)-5", "hello", "a b c d", "0")


class Talk(NamedTuple):
    """A record of what the agent saw in its turns, by prompt. With the gateway also the samples and counts."""

    seen: list[list[Any]]
    rollouts: list[Rollout]
    events: list[str]


def speaker(path: Path) -> PreTrainedModel:
    """Write a model that writes characters and the end of a turn only: a server that sends text would lose any other token."""
    model = tiny_qwen3(path, tied=False)
    others = torch.tensor([i for i in range(VOCAB_SIZE) if i != EOS and not 4 <= i < 4 + len(CHARACTERS)])
    with torch.no_grad():
        model.lm_head.weight[others] = 0
    model.save_pretrained(path)
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve("vllm", tmp_path_factory.mktemp("vllm"), make=speaker) as served:
        yield served


@pytest.fixture
def agent(tmp_path: Path) -> UserFunction:
    (tmp_path / "agents.py").write_text(AGENT)
    return load_function(f"{tmp_path / 'agents.py'}:agent")


def with_public_server(served: Served, agent: UserFunction) -> Talk:
    address = served.engine.endpoints[0].address
    assert address is not None
    name = call(served, "GET", "/v1/models")["data"][0]["id"]
    tasks = [AgentTask(prompt, "", {}, f"{address.url}/v1", address.key, name) for prompt in PROMPTS]
    seen = []
    for task in tasks:
        assert asyncio.run(agent.value(task)) == 1.0  # type: ignore[arg-type]
        seen.append(_taken(agent))
    return Talk(seen, [], [])


def with_gateway(served: Served, agent: UserFunction) -> Talk:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chat = ChatFormat(tokenizer, *text_functions(tokenizer))
    seen: list[list[Any]] = []
    rollouts: list[Rollout] = []
    with CustomRollouts(served.engine, agent, chat.encode, chat.decode, chat=chat) as custom:
        for number, text in enumerate(PROMPTS):
            prompt = Prompt(number, tuple(chat.encode(text)), "")
            rollouts += custom.generate([prompt], SamplingParams(1, 0.0, 200, (EOS,)), seed=0)
            seen.append(_taken(agent))
        return Talk(seen, rollouts, custom.take_events())


def test_an_agent_sees_the_same_answers_and_its_tokens_are_those_that_were_sampled(served: Served, agent: UserFunction) -> None:
    public, ours = with_public_server(served, agent), with_gateway(served, agent)
    assert ours.seen == public.seen and all(len(turns) == TURNS for turns in ours.seen)
    assert len({str(turns) for turns in ours.seen}) == len(PROMPTS)
    total = TURNS * len(PROMPTS)
    assert ours.events == [f"gateway: {total} turns, 0 rewrites, 0 branches, 0 template_rewrites, 0 drift"]
    tokenizer = char_tokenizer()
    for turns, rollout in zip(ours.seen, ours.rollouts, strict=True):
        texts = [turn if isinstance(turn, str) else turn[0] for turn in turns]
        assert tokenizer.decode(rollout.token_ids_L[rollout.response_mask_L], skip_special_tokens=True) == "".join(texts)
    assert logprob_diff(served.model, ours.rollouts, 1.0) <= MAX_LOGPROB_DIFF


def _taken(agent: UserFunction) -> list[Any]:
    seen = agent.value.__globals__["SEEN"]
    turns = list(seen)
    seen.clear()
    return turns
