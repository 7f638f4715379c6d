"""The gateway: an agent with the unchanged `openai` client makes samples whose tokens are exactly those that were sampled."""

import asyncio
import re
import socket
import string
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.loop import LoopThread
from tepo_megatron.base.processes import SPARE_FILES
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import LimitsConfig
from tepo_megatron.data import text_functions
from tepo_megatron.engines.samples import checked_rollout
from tepo_megatron.losses.advantages import group_advantages
from tepo_megatron.monitor.metrics import Metrics
from tepo_megatron.rollout import custom as rollout_custom
from tepo_megatron.rollout.chat import ChatFormat
from tepo_megatron.rollout.containment import LossCounter
from tepo_megatron.rollout.custom import FILES_OF_AN_AGENT, CustomRollouts, load_function
from tepo_megatron.rollout.gateway import Gateway

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
HEADER = """
import asyncio, time
import httpx
from openai import AsyncOpenAI
from tepo_megatron.rollout.agent import openai_agent
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
def user(text): return {"role": "user", "content": text}
def tool(call, text): return {"role": "tool", "tool_call_id": call.id, "content": text}
@openai_agent
async def agent(task):
    client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
    async def ask(*messages, **more):
        return await client.chat.completions.create(model=task.model, messages=list(messages), **more)
"""


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters, and of `ab` as one token, which the model may also write as two."""
    entries = [*SPECIAL, "<unk>", "ab", *string.printable]
    made = Tokenizer(models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"ab|[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.chat_template = template
    return fast


class Scripted:
    """A sampler that writes given texts, one for each turn, and remembers the contexts."""

    def __init__(self, chat: ChatFormat, turns: Sequence[Sequence[int]]) -> None:
        self.chat, self.turns = chat, list(turns)
        self.contexts: list[tuple[int, ...]] = []

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        ids = self.turns[len(self.contexts) % len(self.turns)][: sampling.max_tokens]
        self.contexts.append(prompt.token_ids)
        await asyncio.sleep(0)
        logprobs = [-float(len(self.contexts))] * len(ids)
        stop = "stop" if ids[-1] in (2, *sampling.stop_token_ids) else "length"
        return [checked_rollout(prompt, ids, logprobs, stop, sampling, 3)]

    def generate(self, *_: Any) -> list[Rollout]:
        raise AssertionError("past the function")

    def open(self) -> Any:
        raise AssertionError("past the function")


@contextmanager
def agents(
    folder: Path, body: str, texts: Sequence[str | list[int]], template: str | None = CHATML, **limits: Any
) -> Iterator[tuple[CustomRollouts, Scripted, ChatFormat]]:
    (folder / "agents.py").write_text(HEADER + "".join(f"    {line}\n" for line in body.strip().splitlines()))
    made = tokenizer(template)
    chat = ChatFormat(made, *text_functions(made))
    engine = Scripted(chat, [list(chat.encode(t)) if isinstance(t, str) else t for t in texts])
    function = load_function(f"{folder / 'agents.py'}:agent")
    with CustomRollouts(
        engine, function, chat.encode, chat.decode, limits=LimitsConfig(**{"seconds": 20.0, **limits}), chat=chat
    ) as custom:
        yield custom, engine, chat


def run(folder: Path, body: str, texts: Sequence[Any], template: str | None = CHATML, samples: int = 1, **limits: Any) -> Any:
    """Return (rollouts, contexts, chat, events)."""
    with agents(folder, body, texts, template, **limits) as (custom, engine, chat):
        prompt = Prompt(7, tuple(chat.encode("hi")), "9", {"level": 3})
        rollouts = custom.generate([prompt], SamplingParams(samples, 1.0, 400, (2,)), seed=0)
        return rollouts, engine.contexts, chat, custom.take_events()


CONVERSE = """
assert [m.id async for m in client.models.list()] == [task.model] and task.answer == "9" and task.row["level"] == 3
first = await ask(user(task.prompt), tools=TOOLS)
called = first.choices[0].message
assert first.choices[0].finish_reason == "tool_calls" and called.tool_calls[0].function.arguments == '{"a": 1}'
history = [user(task.prompt), called.model_dump(), tool(called.tool_calls[0], "abc")]
parts = [part async for part in await ask(*history, tools=TOOLS, stream=True, stream_options={"include_usage": True})]
text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
assert parts[-1].usage.completion_tokens == 4, parts[-1]
third = await ask(*history, {"role": "assistant", "content": text}, user("more"), tools=TOOLS, stop="=")
assert third.choices[0].stop_reason == "=" and third.choices[0].message.content == "x"
return 0.5
"""


def test_turns_continue_the_exact_tokens_that_were_sampled(tmp_path: Path) -> None:
    """The second turn is `a`, `b` in two tokens, which encoding its text would merge into one."""
    split = [5 + string.printable.index("a"), 5 + string.printable.index("b"), 5 + string.printable.index("!"), 2]
    (rollout,), contexts, chat, events = run(tmp_path, CONVERSE, [CALL + "<|im_end|>", split, "x="])
    turns = [list(chat.encode(CALL + "<|im_end|>")), split, list(chat.encode("x="))]
    between = [
        "<add><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>tool\nabc<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n",
    ]
    expected, mask, logprobs = [], [], []
    for number, (others, turn) in enumerate(zip(between, turns, strict=True), 1):
        expected += list(chat.encode(others))
        assert list(contexts[number - 1]) == expected
        mask += [False] * (len(expected) - len(mask)) + [True] * len(turn)
        logprobs += [0.0] * (len(expected) - len(logprobs)) + [-float(number)] * len(turn)
        expected += turn
    assert rollout.token_ids_L.tolist() == expected and rollout.response_mask_L.tolist() == mask
    assert rollout.rollout_logprobs_L.tolist() == logprobs and not rollout.failure
    assert (rollout.reward, rollout.score, rollout.status, rollout.sample) == (0.5, 0.5, "given", -1)
    assert events == ["gateway: 3 turns, 0 rewrites, 0 branches, 0 template_rewrites, 1 drift"]


def test_a_message_includes_its_stop_string_if_the_request_says_so(tmp_path: Path) -> None:
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        body = (
            f"m = (await ask(user('a'), stop='=', extra_body={{{name!r}: True}})).choices[0].message\n"
            "assert m.content == 'x='\nawait ask(user('a'), m.model_dump(), user('b'))"
        )
        (rollout,), _, chat, events = run(tmp_path, body, ["x=", "1<|im_end|>"])
        assert chat.decode(rollout.response_ids) == "x=1", rollout.failure
        assert events == ["gateway: 2 turns, 0 rewrites, 0 branches, 0 template_rewrites, 0 drift"]


BRANCH = """
first = (await ask(user("a"))).choices[0].message
left = await ask(user("a"), first.model_dump(), user("b"))
right = await ask(user("a"), first.model_dump(), user("c"))
other = await ask(user("summary"))
"""


def test_branches_and_rewrites_are_sequences_of_one_sample(tmp_path: Path) -> None:
    rollouts, _, chat, events = run(tmp_path, BRANCH, ["1<|im_end|>", "2<|im_end|>", "3<|im_end|>", "4<|im_end|>"])
    assert [chat.decode(r.response_ids) for r in rollouts] == ["12", "3", "4"]  # each sampled token is trained on once
    assert {r.sample for r in rollouts} == {0} and rollouts[1].token_ids_L.tolist()[:5] == rollouts[0].token_ids_L.tolist()[:5]
    assert events == ["gateway: 4 turns, 1 rewrites, 1 branches, 0 template_rewrites, 0 drift"]


def test_advantages_of_sequences_and_of_the_rest_of_a_group() -> None:
    def sequence(sample: int, reward: float) -> Rollout:
        ids = torch.tensor([1, 2])
        return Rollout(1, ids, torch.tensor([False, True]), torch.zeros(2), 0, "stop", "", reward, reward, sample=sample)

    group = [sequence(0, 1.0), sequence(0, 1.0), sequence(0, 1.0), sequence(1, 0.0), sequence(-1, 0.5)]
    # rewards of the three samples: 1, 0, 0.5, with mean 0.5 and deviation 0.5
    assert group_advantages(group, "mean").tolist() == [0.5, 0.5, 0.5, -0.5, 0.0]
    assert group_advantages(group, "std").tolist() == pytest.approx([1, 1, 1, -1, 0], abs=1e-5)
    lost = Rollout(1, torch.tensor([1]), torch.tensor([False]), torch.zeros(1), 0, "stop", sample=2, failure="raised")
    counter, metrics = LossCounter(0.4), Metrics()
    assert counter.take([group[0], lost, group[3]]) == [group[0], group[3]]
    counter.end_step(1, metrics)
    assert metrics.means()["rollout/samples_raised"] == 1
    assert counter.take([group[0], group[1], lost]) == []  # one sample alone cannot be compared
    assert LossCounter(0.5).take([group[0], lost]) == []
    assert counter.take([lost, lost]) == []
    with pytest.raises(RolloutError, match=r"step 2: 3 of 6 samples .* rollout\.max_failed_share=0\.4; .* The first: raised"):
        counter.end_step(2, metrics)


HOSTILE = {  # body, what is lost (empty: the sample is kept)
    "raises": ("await ask(user('a'))\n1 / 0", r"ZeroDivisionError.*agents\.py"),
    "exits": ("raise SystemExit", "SystemExit"),
    "hangs": ("await asyncio.sleep(1e6)", r"timed out after rollout\.limits\.seconds=0\.5"),
    "ignores its cancellation": (
        "while True:\n    try:\n        await asyncio.sleep(1e6)\n    except BaseException:\n        pass",
        "timed out",
    ),
    "blocks its thread": ("time.sleep(1e6)", "timed out after .*: it blocks its thread"),
    "computes for ever": ("while True:\n    pass", "it blocks its thread"),
    "waits in another thread": ("await asyncio.to_thread(time.sleep, 1e6)", "timed out"),
    "endless turns": ("while True:\n    await ask(user('a'))", r"over its limit of turns: rollout\.limits\.turns=5"),
    "catches the limit": (
        "for _ in range(20):\n    try:\n        await ask(user('a'))\n    except Exception:\n        pass",
        "over its limit of turns",
    ),
    "thousands of tool calls": (
        "while True:\n    await ask(user('call'), tools=TOOLS)",
        r"over its limit of tool_calls: rollout\.limits\.tool_calls=4",
    ),
    "writes nothing": ("pass", "ended before the model wrote anything"),
    "leaves a turn running": ("await ask(user('a'))\nasyncio.ensure_future(ask(user('b')))\nawait asyncio.sleep(0.02)", None),
    "returns rubbish": ("await ask(user('a'))\nreturn 'good'", "it returned 'good'"),
    "returns nan": ("await ask(user('a'))\nreturn float('nan')", "it returned nan"),
    "giant message": (
        "await ask(user('a'))\ntry:\n    await ask(user('a' * 9_000_000))\nexcept Exception as e:\n"
        "    assert e.status_code == 413, e",
        "",
    ),
    "too long a context": ("await ask(user('a'))\nawait ask(user('a' * 1000))", ""),
    "wrong key": (
        "await ask(user('a'))\nclient.api_key = 'guess'\ntry:\n    await ask(user('a'))\nexcept Exception as e:\n"
        "    assert e.status_code == 401, e",
        "",
    ),
    "key of another sample": (
        "import builtins\nkeys = builtins.__dict__.setdefault('_keys', [])\nkeys.append(task.api_key)\nawait ask(user('a'))\n"
        "client.api_key = next(key for key in keys if key != task.api_key)\ntry:\n    await ask(user('a'))\n"
        "except Exception as e:\n    assert e.status_code == 401, e",
        "",
    ),
    "cut stream": ("stream = await ask(user('a'), stream=True)\nawait stream.close()\nawait ask(user('a'))", ""),
    "malformed requests": (
        "await ask(user('a'))\nasync with httpx.AsyncClient(headers={'Authorization': f'Bearer {task.api_key}'}) as raw:\n"
        "    for body in ('{', '[]', '{}', '{\"messages\": 3}', '{\"messages\": [3]}', '{\"messages\": [{\"content\": 3}]}', "
        "'[' * 100_000):\n        answer = await raw.post(task.base_url + '/chat/completions', content=body)\n"
        "        assert answer.status_code == 400, (body[:30], answer.text)",
        "",
    ),
    "rewrites its history": ("for i in range(4):\n    await ask(user(str(i)))", ""),
}


SHARED_CLIENT = """
await ask(user('a'))
if counted() == 2:
    time.sleep(1e6)
async with at_once:
    await asyncio.sleep(0.01)
    await ask(user('b'))"""


def test_all_samples_of_a_step_connect_while_the_gateway_is_busy() -> None:
    loop, gateway, over = LoopThread("gateway"), Gateway(str), threading.Event()

    async def busy() -> None:
        over.wait(60.0)

    loop.run(gateway.start())
    held = loop.submit(busy())
    try:
        with ExitStack() as stack:
            for _ in range(512):  # a connection beyond the queue is refused without a word, again and again
                stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=10.0))
            over.set()
            held.result(60.0)
            loop.run(gateway.close())
    finally:
        over.set()
        loop.stop()


COUNTED = """
agent.running = getattr(agent, "running", 0) + 1
at_once = agent.running
await ask(user("a"))
agent.running -= 1
return at_once
"""


def test_as_many_agents_run_at_once_as_there_are_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SPARE_FILES + 3 * FILES_OF_AN_AGENT
    monkeypatch.setattr(rollout_custom, "raise_open_file_limit", lambda: psutil.Process().num_fds() + files)
    rollouts, _, _, (event, _) = run(tmp_path, COUNTED, ["x<|im_end|>"], samples=8)
    assert len(rollouts) == 8 and max(rollout.reward for rollout in rollouts) == 3
    assert event.startswith("only 3 of 8 agents run at once, because a process may open ") and "`ulimit -n " in event


@pytest.mark.slow
def test_a_new_thread_has_clients_and_locks_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = (
        "import builtins\nshared = AsyncOpenAI(base_url='http://127.0.0.1', api_key='x', timeout=None, max_retries=0)\n"
        "at_once = asyncio.Semaphore(1)\ncalls = builtins.__dict__.setdefault('_calls_of_agents', [])\n"
        "def counted(): calls.append(1); return len(calls)\n@openai_agent"
    )
    own = "client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)"
    assert own in HEADER
    header = HEADER.replace("@openai_agent", shared)
    header = header.replace(own, "client = shared.with_options(base_url=task.base_url, api_key=task.api_key)")
    monkeypatch.setattr("tests.unit.rollout.test_gateway.HEADER", header)
    rollouts, *_ = run(tmp_path, SHARED_CLIENT, ["1<|im_end|>"], samples=8, seconds=12.0)
    failures = [rollout.failure for rollout in rollouts if rollout.failure]
    assert len(failures) == 1 and "it blocks its thread" in failures[0], failures


@pytest.mark.slow
def test_hostile_agents_lose_their_samples_and_nothing_else(tmp_path: Path) -> None:
    for name, (body, lost) in HOSTILE.items():
        seconds = 0.5 if lost is not None and ("timed out" in lost or "blocks" in lost) else 20.0
        texts = [CALL + CALL + "<|im_end|>"] if "tool calls" in name else ["1<|im_end|>"]
        rollouts, *_ = run(tmp_path, body, texts, samples=2, turns=5, tool_calls=4, seconds=seconds)
        assert len({r.sample if r.sample >= 0 else -1 - i for i, r in enumerate(rollouts)}) == 2, name
        for rollout in rollouts if lost is not None else ():
            assert re.search(lost, rollout.failure) if lost else not rollout.failure, (name, rollout.failure)
