"""A calculator for the demo's model: where it writes `9+5=`, the sum is worked out for it, and it goes on from there.

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
    """`rollout.function` of `demo.yaml`."""
    call = conversation.encode("=")  # one token, at which a turn ends
    for _ in range(MOST_CALLS):
        turn = await conversation.generate(stop_token_ids=call)
        if not turn.text.endswith("="):
            return  # the answer is complete, or was cut off
        conversation.append(result(conversation.text))
    await conversation.generate()


def result(text: str) -> str:
    """What the calculator says to a text that ends in "=": the sum or difference right before it, "?" where there is none."""
    called = CALL.search(text)
    if called is None:
        return "?"
    left, sign, right = called.groups()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))
