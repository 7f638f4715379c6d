"""A calculator for the demo's model: where the model writes `9+5=`, the tool inserts the sum, and the model continues.

    prompt    9+5-7?
    sample    9+5=14-7=7.\\boxed{7}        the 14 and the first 7 are the tool's: context, not trained on

The model still has to learn to write its solution out: a guess asks for no tool.
"""

from __future__ import annotations

import re

from tepo_megatron.rollout.conversation import Conversation

MOST_CALLS = 4  # of a sample: the demo's longest chain of operations
CALL = re.compile(r"(\d+)([+-])(\d+)=$")


async def calculator(conversation: Conversation) -> None:
    """Run one sample with the calculator; `rollout.function` of `demo.yaml` names this function."""
    call = conversation.encode("=")  # one token, at which a turn ends
    for _ in range(MOST_CALLS):
        turn = await conversation.generate(stop_token_ids=call)
        if not turn.text.endswith("="):
            return  # the answer is complete, or was cut off
        conversation.append(result(conversation.text))
    await conversation.generate()


def result(text: str) -> str:
    """Return the result of the sum or difference at the end of a text that ends in "="; "?" if there is none."""
    called = CALL.search(text)
    if called is None:
        return "?"
    left, sign, right = called.groups()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))
