"""Measure what a turn costs in the gateway of agents.

    python -m benchmarks.gateway [--conversations 1024] [--quick] [--json FILE]

This process serves the conversations, which are all open at once. A second process is their client. The engine answers at
once, so that the CPU time of this process is the cost of the gateway: HTTP, rendering the chat, and the bookkeeping of tokens.
A turn adds 200 bytes of a user and 64 tokens of the model. A tokenizer without merges makes a token of each byte.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tepo_megatron.config import LimitsConfig
from tepo_megatron.data import text_functions
from tepo_megatron.inference.samples import checked_rollout
from tepo_megatron.rollout.agent import AgentSample
from tepo_megatron.rollout.chat import ChatFormat
from tepo_megatron.rollout.gateway import Gateway
from tepo_megatron.types import Prompt, Rollout, SamplingParams

TURNS = (4, 16, 64)  # of a conversation
USER_BYTES, MODEL_TOKENS = 200, 64
CONTEXT = 1 << 20  # more tokens than any conversation has
CLIENT_SECONDS = 1800.0
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_format() -> ChatFormat:
    """Return a ChatML format over bytes."""
    entries = ["<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens({"additional_special_tokens": entries[:1]})
    tokenizer.chat_template = CHATML
    return ChatFormat(tokenizer, *text_functions(tokenizer))


async def measure(conversations: int, turns: int) -> dict[str, Any]:
    """Return the milliseconds of a turn, and how many turns did not continue their conversation's tokens."""
    chat = chat_format()
    end, letter = chat.encode("<|im_end|>")[0], chat.encode("a")[0]
    written = [letter] * (MODEL_TOKENS - 1) + [end]

    async def turn(context: Prompt, sampling: SamplingParams, seed: int) -> Rollout:
        return checked_rollout(context, written, [-1.0] * MODEL_TOKENS, "stop", sampling, 0)

    limits, sampling = LimitsConfig(turns=turns), SamplingParams(1, 1.0, CONTEXT, (end,))
    prompt = Prompt(0, tuple(chat.encode("a question")), "")
    made = [AgentSample(prompt, sampling, 0, sample_turn=turn, chat=chat, limits=limits) for _ in range(conversations)]
    gateway = Gateway(chat.decode)
    await gateway.start()
    try:
        with ExitStack() as stack:
            tasks = [stack.enter_context(gateway.open_sample(sample)) for sample in made]
            work = json.dumps([turns, [[task.base_url, task.api_key] for task in tasks]]).encode()
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.gateway", "--client",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                cpu, wall = time.process_time(), time.monotonic()
                out, _ = await asyncio.wait_for(client.communicate(work), CLIENT_SECONDS)
                cpu, wall = time.process_time() - cpu, time.monotonic() - wall
            finally:
                if client.returncode is None:
                    client.kill()
                    await client.wait()
            sequences = sum(len(sample.finish()) for sample in made)
    finally:
        await gateway.close()
    count = conversations * turns
    if client.returncode or json.loads(out) != count or sum(sample.turns for sample in made) != count:
        raise RuntimeError(f"the client made {out!r} of {count} turns and ended with {client.returncode}")
    broken = sequences - conversations + sum(sample.counts["template_rewrites"] for sample in made)
    return {"turns": turns, "cpu_ms": 1000 * cpu / count, "wall_ms": 1000 * wall / count, "broken": broken}


async def converse(turns: int, samples: list[list[str]]) -> int:
    """Hold all conversations at once, and return the number of answers."""

    async def one(session: aiohttp.ClientSession, address: str, key: str) -> int:
        messages: list[dict[str, Any]] = []
        for _ in range(turns):
            messages.append({"role": "user", "content": "b" * USER_BYTES})
            body, headers = {"model": "policy", "messages": messages}, {"Authorization": f"Bearer {key}"}
            async with session.post(f"{address}/chat/completions", json=body, headers=headers) as answer:
                answer.raise_for_status()
                messages.append((await answer.json())["choices"][0]["message"])
        return turns

    timeout = aiohttp.ClientTimeout(total=CLIENT_SECONDS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=256), timeout=timeout) as session:
        return sum(await asyncio.gather(*(one(session, *sample) for sample in samples)))


def main() -> None:
    """Measure conversations of several lengths; print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=1024)
    parser.add_argument("--quick", action="store_true", help="few conversations, to see that it runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(asyncio.run(converse(*json.load(sys.stdin))))
        return
    conversations, load = (16 if args.quick else args.conversations), os.getloadavg()[0]
    rows = [asyncio.run(measure(conversations, turns)) for turns in TURNS]
    print(f"{conversations} conversations, {len(os.sched_getaffinity(0))} cores, load {load:.1f} before")
    for row in rows:
        print("{turns:3d} turns: {cpu_ms:.2f} ms of CPU and {wall_ms:.2f} ms of wall a turn, {broken} broken".format(**row))
    if args.json is not None:
        args.json.write_text(json.dumps({"load": load, "conversations": conversations, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
