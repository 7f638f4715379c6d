"""The Responses API of the gateway: what the openai client and the openai-agents SDK get and send back, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import response_create_params as params

from tepo_megatron.base.types import SamplingParams
from tepo_megatron.rollout.chat_request import RefusedRequest
from tepo_megatron.rollout.gateway import read_responses_request
from tests.unit.rollout.test_environments import pieces
from tests.unit.rollout.test_gateway import CALL, run
from tests.unit.rollout.test_gateway_requests import LABELS

SAMPLING = SamplingParams(1, 0.7, 400, (2,), top_p=0.9)
OPEN = "<|im_start|>assistant\n"
TOOL = {"type": "function", "name": "add", "parameters": {}, "strict": True}
CONVERSE = """
from openai.types.responses import Response
TOOL = {"type": "function", "name": "add", "parameters": {}, "strict": True}
def respond(items, **more):
    return client.responses.create(model=task.model, instructions="count", input=items, tools=[TOOL], **more)
first = await respond("hi")
Response.model_validate(first.model_dump(), strict=True)
(called,) = first.output
assert (called.type, called.name, called.arguments, first.status) == ("function_call", "add", '{"a": 1}', "completed")
result = {"type": "function_call_output", "call_id": called.call_id, "output": "2"}
items = [user("hi"), called.model_dump(exclude_none=True), result]
second = await respond(items)
assert second.output_text == "2" and second.usage.output_tokens == 2 and second.usage.input_tokens > first.usage.input_tokens
items += [second.output[0].model_dump(), {"role": "user", "content": [{"type": "input_text", "text": "more"}]}]
async with client.responses.stream(model=task.model, instructions="count", input=items, tools=[TOOL]) as stream:
    text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
    last = await stream.get_final_response()
Response.model_validate(last.model_dump(), strict=True)
assert last.output[0].content[0].text == text == "x ", last
assert last.output[1].arguments == '{"a": 1}' and last.status == "completed"
return 0.5
"""


def test_a_conversation_continues_the_exact_tokens(tmp_path: Path) -> None:
    turns = [CALL + "<|im_end|>", "2<|im_end|>", f"x {CALL}<|im_end|>"]
    (rollout,), _, _, events = run(tmp_path, CONVERSE, turns)
    assert not rollout.failure and rollout.reward == 0.5
    assert events == ["gateway: 3 turns, 0 rewrites, 0 branches, 0 template_rewrites, 0 drift"]
    assert pieces(rollout) == [
        f"<add><|im_start|>system\ncount<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n{OPEN}", turns[0],
        f"\n<|im_start|>tool\n2<|im_end|>\n{OPEN}", turns[1], f"\n<|im_start|>user\nmore<|im_end|>\n{OPEN}", turns[2],
    ]  # fmt: skip


CUT = """
response = await client.responses.create(model=task.model, input="hi", {limit})
assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
raise ValueError("the SDK raises for it")
"""


def test_a_turn_that_was_cut_off_ends_the_sample(tmp_path: Path) -> None:
    for limit, length in (("max_output_tokens=3", 3), ("", 400)):
        (rollout,), *_ = run(tmp_path, CUT.replace("{limit}", limit), [[9] * 500])
        assert (rollout.failure, rollout.stop_reason) == ("", "length") and rollout.response_mask_L.sum() <= length
    (rollout,), *_ = run(tmp_path, CUT.replace("{limit}", ""), ["1<|im_end|>"])
    assert "AssertionError" in rollout.failure


SDK = Path(".cache/agents-sdk")
WITH_THE_SDK = """
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
set_tracing_disabled(True)
@function_tool
def add(a: int) -> str:
    "Add one."
    return str(a + 1)
model = OpenAIResponsesModel(model=task.model, openai_client=client)
sdk = Agent(name="counter", instructions="count", model=model, tools=[add])
result = await Runner.run(sdk, task.prompt)
assert result.final_output == "2"
result = Runner.run_streamed(sdk, result.to_input_list() + [user("more")])
async for event in result.stream_events():
    pass
return float(result.final_output == "3")
"""


@pytest.mark.full
def test_the_unchanged_openai_agents_sdk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not SDK.exists():
        pytest.skip("the openai-agents SDK is not installed: make agents-sdk")
    monkeypatch.syspath_prepend(SDK.resolve())
    turns = [CALL + "<|im_end|>", "2<|im_end|>", "3<|im_end|>"]
    (rollout,), _, _, events = run(tmp_path, WITH_THE_SDK, turns)
    assert not rollout.failure and rollout.reward == 1.0
    assert events == ["gateway: 3 turns, 0 rewrites, 0 branches, 0 template_rewrites, 0 drift"]
    assert pieces(rollout) == [
        f"<add><|im_start|>system\ncount<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n{OPEN}", turns[0],
        f"\n<|im_start|>tool\n2<|im_end|>\n{OPEN}", turns[1], f"\n<|im_start|>user\nmore<|im_end|>\n{OPEN}", turns[2],
    ]  # fmt: skip
    (rollout,), *_ = run(tmp_path, WITH_THE_SDK, [CALL + "<|im_end|>", [9] * 500])
    assert (rollout.failure, rollout.stop_reason) == ("", "length")


HONOURED = {"input", "instructions", "model", "tools", "max_output_tokens", "stream"}
USER = {"role": "user", "content": "a"}


def request_of(**fields: Any) -> Any:
    return read_responses_request({"input": "a", "model": "policy", **fields}, SAMPLING)


def test_every_field_of_the_openai_package_is_honoured_or_refused() -> None:
    fields = params.ResponseCreateParamsBase.__annotations__.keys() | {"stream"}
    assert len(fields) > 30 and fields > HONOURED | LABELS
    for field in fields:
        assert field == "input" or request_of(**{field: None}) == request_of()
        if field in LABELS:
            assert request_of(**{field: "x"}) == request_of(), field
            continue
        with pytest.raises(RefusedRequest, match=field):
            request_of(**{field: {"another": "value"}})
    assert request_of(include=[], temperature=0.7, top_p=0.9, tool_choice="none", truncation="disabled") == request_of()


BAD: list[tuple[Any, str]] = [
    ([{"type": "item_reference", "id": "msg_1"}], r"input\[0\] is of type 'item_reference'"),
    ([USER, {"type": "reasoning", "summary": []}], r"input\[1\] is of type 'reasoning'"),
    ([USER, {"role": "user", "content": [{"type": "input_image"}]}], r"input\[1\].content has a part of type 'input_image'"),
    ([USER, {"type": "function_call", "name": "add"}], r"input\[1\] must have call_id, name and arguments"),
    ([USER, {"type": "function_call_output", "call_id": "1", "output": 3}], r"input\[1\].content must be text"),
    ([USER, "a"], r"input\[1\] is of type 'str'"),
    ([], "input must be text, or a list"),
]


def test_what_the_gateway_cannot_do_is_refused_by_name() -> None:
    for items, words in BAD:
        with pytest.raises(RefusedRequest, match=words):
            request_of(input=items)
    for tool, words in (
        ({"type": "web_search"}, "tools must be"),
        ({**TOOL, "defer_loading": True}, r"tools\[0\].defer_loading"),
    ):
        with pytest.raises(RefusedRequest, match=words):
            request_of(tools=[tool])
    assert request_of(tools=[TOOL]).tools == [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def test_calls_belong_to_the_message_before_them() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "2"}]}
    said = {"role": "assistant", "content": "x"}
    messages = request_of(input=[USER, said, call, {**call, "call_id": "2"}, result, call]).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["1", "2"] and messages[1]["content"] == "x"
    assert messages[2] == {"role": "tool", "tool_call_id": "1", "content": "2"} and messages[3]["content"] is None
