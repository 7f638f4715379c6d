"""The demo's calculator as an agent: it talks to the model through the `openai` client, as it would to a public server.

The demo's tokenizer has no chat template, so that a chat is the concatenation of its messages.
"""

import re

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tepo_megatron.rollout.agent import AgentTask, openai_agent

MOST_CALLS = 4  # of a sample: the demo's longest chain of operations
CALL = re.compile(r"(\d+)([+-])(\d+)$")


@openai_agent
async def calculator(task: AgentTask) -> None:
    """Run one sample with the calculator; `rollout.function` of `calculator.yaml` names this function."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": task.prompt}]
    written = ""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        for _ in range(MOST_CALLS + 1):
            answer = await client.chat.completions.create(model=task.model, messages=messages, stop="=")
            choice = answer.choices[0]
            text = choice.message.content or ""
            if getattr(choice, "stop_reason", None) != "=":
                return  # the answer is complete, or was cut off
            found = result(written + text)
            written += f"{text}={found}"
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": found}]


def result(text: str) -> str:
    """Return the result of the sum or difference at the end of a text; "?" if there is none."""
    called = CALL.search(text)
    if called is None:
        return "?"
    left, sign, right = called.groups()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))
