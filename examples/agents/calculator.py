"""The demo's calculator as an agent: it talks to the model through the `openai` client, as it would to a public server.

The demo's tokenizer has no chat template, so that a chat is the concatenation of its messages.
"""

import re

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tepo_megatron.rollout.agent import AgentTask, openai_agent

MOST_CALLS = 4  # of a sample: the demo's longest chain of operations
CALL = re.compile(r"(\d+)([+-])(\d+)=$")
KEEP_STOP = {"include_stop_str_in_output": True}  # so that the model sees "=" in its next turn from every server
# Samples share its connections: making one client per sample holds up the others. The sample has a
# deadline, so that requests need none.
SHARED = AsyncOpenAI(base_url="http://127.0.0.1", api_key="set for each sample", max_retries=0, timeout=None)


@openai_agent
async def calculator(task: AgentTask) -> None:
    """Run one sample with the calculator; `rollout.function` of `calculator.yaml` names this function."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": task.prompt}]
    written = ""
    client = SHARED.with_options(base_url=task.base_url, api_key=task.api_key)
    for _ in range(MOST_CALLS + 1):
        answer = await client.chat.completions.create(model=task.model, messages=messages, stop="=", extra_body=KEEP_STOP)
        text = answer.choices[0].message.content or ""
        if not text.endswith("="):
            return  # the answer is complete, or was cut off
        found = result(written + text)
        written += text + found
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": found}]


def result(text: str) -> str:
    """Return the result of the sum or difference at the end of a text, which ends with "="; "?" if there is none."""
    called = CALL.search(text)
    if called is None:
        return "?"
    left, sign, right = called.groups()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))
