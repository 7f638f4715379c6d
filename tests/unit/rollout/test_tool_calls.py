"""Tool calls are read in the form of each family, as vLLM's own parsers read them."""

import json
import time

import pytest

from tepo_megatron.rollout.chat import FORMS, HERMES, ToolForm, form_of
from tests.tiny import char_tokenizer

MISTRAL, XML, _, LLAMA = FORMS
TYPES = {"a": "integer", "x": "number", "t": "string", "o": "object", "l": "array", "b": "boolean"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (("add", {key: {"type": kind} for key, kind in TYPES.items()}), ("now", {}))
]
ADD = '{"name": "add", "arguments": {"a": 1}}'


def tagged(*bodies: str, end: str = "</tool_call>") -> str:
    return "\n".join(f"<tool_call>\n{body}\n{end}" for body in bodies)


def function(name: str, end: str = "</function>", **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<function={name}>\n{inner}{end}"


CASES: list[tuple[str, ToolForm, str]] = [
    *(("hermes", HERMES, text) for text in (
        "no call", tagged(ADD), f"I see.\n{tagged(ADD, ADD)}", tagged(ADD, end=""), tagged('{"name": "now", "arguments": {}}'),
        tagged('{"name": "add", "arguments": {"t": "ä <b> \\" {}"}}'), tagged("{broken"), tagged(ADD, "{broken"), tagged("3"),
        tagged('{"arguments": {}}'), "<tool_call>", "</tool_call>", f"{tagged(ADD)} and more",
    )),
    *(("qwen3_coder", XML, text) for text in (
        "no call", tagged(function("now")), f"I see.\n\n{tagged(function('add', a='12', t='12'))}",
        tagged(function("add", t="two\nlines\n", o='{"k": [1, 2]}', l="[1]", b="true", x="1.5"), function("now")),
        tagged(function("add", a="-3"), end=""),
    )),
    *(("mistral", MISTRAL, text) for text in (
        "no call", '[TOOL_CALLS]add[ARGS]{"a": 1}', 'I see.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}',
        '[TOOL_CALLS]add{"t": "[1]"}',
    )),
    *(("llama3_json", LLAMA, text) for text in (
        "no call", '{"name": "add", "parameters": {"a": 1}}',
        '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
        'I see. {"name": "now", "arguments": {}}', '{"answer": 3}', '{"name": "add", "parameters": {"a": 1}', "{", "f(x) = {x}",
        '{"name": "add", "parameters": {"o": {"name": "x"}}}',
    )),
]  # fmt: skip


@pytest.mark.slow  # 10 s to import vLLM
def test_calls_are_those_of_vllm_s_parsers() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    asked = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS}
    differ = []
    for parser, form, text in CASES:
        request = ChatCompletionRequest.model_validate(asked)
        found = ToolParserManager.get_tool_parser(parser)(tokenizer, request.tools).extract_tool_calls(text, request)
        theirs = found.content or "", [(c.function.name, json.loads(c.function.arguments)) for c in found.tool_calls]
        content, calls = form.split(text, TOOLS)
        if (content, [(c.name, json.loads(c.arguments)) for c in calls]) != theirs:
            differ.append((parser, text, content, calls, theirs))
    assert differ == []
    assert sum(bool(form.split(text, TOOLS)[1]) for _, form, text in CASES) > len(CASES) / 2


@pytest.mark.parametrize("form", FORMS, ids=["mistral", "xml", "hermes", "llama"])
def test_hostile_texts_are_content_and_take_no_time(form: ToolForm) -> None:
    marks = (
        "<tool_call>",
        "<tool_call>{",
        "<function=",
        "<parameter=",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]{",
        "{",
        "[",
        '{"a":',
        " ",
        "\n",
    )
    texts = [mark * 50_000 for mark in marks]
    texts += [f"<tool_call>\n<function=add>{mark * 50_000}" for mark in marks]
    start = time.process_time()
    for text in texts:
        content, calls = form.split(text, TOOLS)
        assert (not calls and content == text) or form is XML, (text[:40], calls[:3])
    assert time.process_time() - start < 2


def test_the_form_is_that_of_the_template() -> None:
    llama = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    for template, form in (
        (None, HERMES), ("{{ messages }}", HERMES), ("<tool_call>{{ x }}", HERMES), ("<tool_call><function={{ x }}", XML),
        (llama, LLAMA), ("[TOOL_CALLS]{{ x }}", MISTRAL),
    ):  # fmt: skip
        assert form_of(template) is form
