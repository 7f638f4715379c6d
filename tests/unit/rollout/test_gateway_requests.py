"""What a request to the gateway asks for is honoured or refused, and a turn that nobody sees is no part of the sample."""

import asyncio
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params

from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.data import text_functions
from tepo_megatron.rollout.chat import ChatFormat, digests
from tepo_megatron.rollout.chat_request import ChatRequest, RefusedRequest, read_request
from tests.unit.rollout.test_gateway import CHATML, Scripted, run, tokenizer

SAMPLING = SamplingParams(1, 0.7, 400, (2,), top_p=0.9)
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "add"}}
HONOURED: dict[str, tuple[Any, dict[str, Any]]] = {  # field -> (value, what differs in the request)
    "messages": ([USER, USER], {"messages": [USER, USER]}),
    "model": ("policy", {}),  # any other one is refused
    "temperature": (0.7, {}),
    "top_p": (0.9, {}),
    "tools": ([TOOL], {"tools": [TOOL]}),
    "stop": (["="], {"stops": ["="]}),
    "max_tokens": (3, {"max_tokens": 3}),
    "max_completion_tokens": (3, {"max_tokens": 3}),
    "stream": (True, {"stream": True}),
    "stream_options": ({"include_usage": True}, {"with_usage": True}),
}
LABELS = {  # nothing of an answer depends on these
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options",
}  # fmt: skip
ENGINES: dict[str, Any] = {  # what vLLM and SGLang have beyond that
    "chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True, "add_generation_prompt": False,
    "stop_token_ids": [7], "min_tokens": 5, "guided_json": {}, "structured_outputs": {}, "prompt_logprobs": 1, "top_k": 5,
    "min_p": 0.1, "ignore_eos": True, "skip_special_tokens": False, "temperature": 0, "seed": 0, "logprobs": True,
    "parallel_tool_calls": False, "tool_choice": "none", "response_format": {"type": "json_object"}, "n": 2, "top_p": 1,
    "max_tokens": True, "max_completion_tokens": 0, "stop": [7], "stream": 1, "stream_options": "x", "tools": [{}],
    "model": "gpt-5", "echo": True, "best_of": 3,
}  # fmt: skip


def request_of(**fields: Any) -> ChatRequest:
    return read_request({"messages": [USER], "model": "policy", **fields}, SAMPLING)


def test_every_field_of_the_openai_package_is_honoured_or_refused() -> None:
    kinds: list[Any] = [
        chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming,
        completion_create_params.CompletionCreateParamsNonStreaming,
    ]  # fmt: skip
    fields = set().union(*(kind.__annotations__ for kind in kinds))
    assert len(fields) > 35 and fields > HONOURED.keys() and get_type_hints(kinds[0]).keys() <= fields
    for field in fields:
        assert field == "messages" or request_of(**{field: None}) == request_of()
        if field in LABELS:
            assert request_of(**{field: "x"}) == request_of(), field
            continue
        if field in HONOURED:
            value, differs = HONOURED[field]
            assert vars(request_of(**{field: value})) == vars(request_of()) | differs, field
        with pytest.raises(RefusedRequest, match=field):
            request_of(**{field: {"another": "value"}})


def test_values_that_change_an_answer_are_refused_by_name() -> None:
    for field, value in ENGINES.items():
        with pytest.raises(RefusedRequest, match=f"^{field}"):
            request_of(**({"tools": [TOOL]} | {field: value}))
    for field, value in {"response_format": {"type": "text"}, "tool_choice": "auto", "n": 1, "logprobs": False}.items():
        assert request_of(**{field: value}) == request_of()
    assert request_of(tool_choice="none") == request_of()
    assert request_of(max_tokens=9, max_completion_tokens=3).max_tokens == 3


BAD = [  # each is refused before anything is sampled, in words
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "part of type 'image_url'",
    ),
    ({"messages": [{"role": "user", "content": [3]}]}, "part of type int"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content is missing or null"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing or null"),
    ({"messages": [{"content": "a"}]}, "messages[0] must be an object with a role"),
    (
        {"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": [{}]}]},
        "messages[1].tool_calls: each call needs",
    ),
    ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]}, "messages[0].audio: not supported"),
    ({"messages": None}, "messages must be a list"),
    ({"stream": True, "stream_options": "x"}, "stream_options must be an object"),
]
POST = """
import builtins
async with httpx.AsyncClient(trust_env=False, headers={'Authorization': f'Bearer {task.api_key}'}) as raw:
    for body, words in builtins.BAD:
        a = await raw.post(task.base_url + '/chat/completions', json={'messages': [user('a')]} | body)
        assert a.status_code == 400 and words in a.json()['error']['message'], (body, a.text)
    for method, path in (('POST', '/completions'), ('GET', '/responses/x'), ('GET', '/chat/completions'), ('GET', '/models/x')):
        a = await raw.request(method, task.base_url + path)
        assert a.status_code == 404 and f'{method} {path[1:]}: not offered' in a.json()['error']['message'], a.text
        assert 'POST chat/completions' in a.text
await ask(user('a'))
"""


def test_a_bad_request_is_refused_in_words_before_anything_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.BAD", BAD, raising=False)
    (rollout,), contexts, *_ = run(tmp_path, POST, ["1<|im_end|>"])
    assert not rollout.failure and len(contexts) == 1


QWEN = (  # in the manner of Qwen's templates, which know some roles only
    "{% for m in messages %}{% if m.role in ('user', 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = [{"id": "1", "type": "function", "function": {"name": "addition", "arguments": "{}"}}]
CALLED = {"role": "assistant", "content": None, "tool_calls": CALLS}
LEFT_OUT = {  # template -> roles that it leaves out; "calls": the calls of an assistant
    QWEN: {"function", "critic"},
    CHATML: set(),
    QWEN.replace("{{ c.function.name }}", ""): {"function", "critic", "calls"},
    QWEN.replace("in ('user', 'system')", "in ('user',)"): {"function", "critic", "system", "developer"},
    None: {"calls"},
}


def test_each_message_is_found_in_what_the_model_reads_or_refused() -> None:
    for template, left_out in LEFT_OUT.items():
        made = tokenizer(template)
        chat = ChatFormat(made, *text_functions(made))
        for role in ("system", "developer", "user", "assistant", "tool", "function", "critic", "calls"):
            message = CALLED if role == "calls" else {"role": role, "content": f"words of {role}"}
            begun = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
            for _ in range(2):  # the second time the form is known
                if role in left_out:
                    with pytest.raises(ValueError, match=r"^messages\[2\]: the chat template leaves out this message"):
                        chat.start([*begun, message], ())
                    with pytest.raises(ValueError, match=r"^messages\[2\]: the chat template leaves out this message"):
                        chat.continuation([*begun, message], (), 2, 2)
                    continue
                words = "addition" if role == "calls" else str(message["content"])
                assert words in chat.decode(chat.start([*begun, message], ()))
                new, _ = chat.continuation([*begun, message], (), 2, 2)
                assert new is not None and words in chat.decode(new)


def test_tools_that_the_template_does_not_show_are_refused() -> None:
    for template in (QWEN, None, CHATML):
        made = tokenizer(template)
        chat = ChatFormat(made, *text_functions(made))
        if template == CHATML:
            assert "<add>" in chat.decode(chat.start([USER], [TOOL]))
            continue
        with pytest.raises(ValueError, match=r"^tools: the chat template shows the model no tools"):
            chat.start([USER], [TOOL])


def test_a_developer_speaks_as_the_system() -> None:
    made = tokenizer(QWEN)
    chat = ChatFormat(made, *text_functions(made))
    rule = [{"role": "developer", "content": "rule"}, USER]
    assert chat.start(rule, ()) == chat.start([{**rule[0], "role": "system"}, USER], ())
    knows = tokenizer(CHATML + "{# developer #}")
    assert "developer\nrule" in ChatFormat(knows, *text_functions(knows)).decode(
        ChatFormat(knows, *text_functions(knows)).start(rule, ())
    )


AGAIN = """
m = (await ask(user('a'), tools=TOOLS)).choices[0].message.model_dump()
m['tool_calls'][0]['function']['arguments'] = '{"b":"\\\\u007e", "a":1.0}'
await ask(user('a'), m, {"role": "tool", "tool_call_id": m['tool_calls'][0]['id'], "content": "2"}, tools=TOOLS)
m['tool_calls'][0]['function']['arguments'] = '{"b":"\\\\u007e", "a":2}'
await ask(user('a'), m, {"role": "tool", "tool_call_id": m['tool_calls'][0]['id'], "content": "2"}, tools=TOOLS)
"""


def test_tool_arguments_that_a_client_writes_again_are_no_rewrite(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "~"}}</tool_call>'
    rollouts, _, _, events = run(tmp_path, AGAIN, [call + "<|im_end|>", "1<|im_end|>", "2<|im_end|>"])
    assert events == ["gateway: 3 turns, 1 rewrites, 0 branches, 0 template_rewrites, 0 drift"], rollouts[0].failure
    assert digests([{**USER, "reasoning_content": "x"}], ()) != digests([USER], ())


class SlowTurns(Scripted):
    """Takes 20 s for the turns of `slow`, and counts those of them that were cancelled."""

    slow: tuple[int, ...] = ()
    cancelled = 0

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        number = len(self.contexts)
        found = await super().sample(prompt, sampling, seed)
        try:
            await asyncio.sleep(20 if number in self.slow else 0)
        except asyncio.CancelledError:
            SlowTurns.cancelled += 1
            raise
        return found


RETRY = """
client = client.with_options(timeout=0.3, max_retries=2)
first = (await ask(user('a'))).choices[0].message
await ask(user('a'), first.model_dump(), user('b'))
return 1.0
"""
GIVES_UP = """
await ask(user('a'))
try:
    await asyncio.wait_for(ask(user('b')), 0.3)
except TimeoutError:
    pass
return 1.0
"""
LEAVES = "await ask(user('a'))\nleft.append(asyncio.ensure_future(ask(user('b'))))\nawait asyncio.sleep(0.2)\nreturn 1.0"
WRITTEN = [f"{number}<|im_end|>" for number in range(4)]


def test_a_turn_whose_client_has_gone_is_cancelled_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.rollout.test_gateway.Scripted", SlowTurns)
    for body, slow, seen in ((RETRY, (0, 2), "13"), (GIVES_UP, (1,), "0")):
        monkeypatch.setattr(SlowTurns, "slow", slow)
        monkeypatch.setattr(SlowTurns, "cancelled", 0)
        (rollout,), _, chat, events = run(tmp_path, body, WRITTEN)
        assert (chat.decode(rollout.response_ids), rollout.reward, rollout.failure) == (seen, 1.0, "")
        assert SlowTurns.cancelled == len(slow)
        assert events[0].endswith(f" 0 branches, 0 template_rewrites, 0 drift, {len(slow)} abandoned")
        assert ("0 rewrites" in events[0]) == (body is RETRY)


def test_a_request_that_the_agent_left_running_loses_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.unit.rollout.test_gateway.Scripted", SlowTurns)
    monkeypatch.setattr(SlowTurns, "slow", (1,))
    (rollout,), *_ = run(tmp_path, "left = []\n" + LEAVES, WRITTEN)
    assert "a turn is still running" in rollout.failure
