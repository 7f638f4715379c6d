"""A generation function whose samples have two turns, each on the next server, with a tool's output between them."""

from tepo_megatron.rollout.conversation import Conversation


async def two_turns(conversation: Conversation) -> None:
    await conversation.generate(max_tokens=2)
    conversation.append("=")
    await conversation.generate()
