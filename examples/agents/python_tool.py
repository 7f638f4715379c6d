"""Python as a tool: the model's programs run in the sandbox of `rewards/grading/sandbox.py`, and it reads the output.

    expressions   for the demo's model: where it writes `9+5=`, Python prints 14, and the model continues
    code_blocks   for chat models whose template is ChatML (Qwen): a turn with a code block is answered with the block's output

Each program has a sandbox of its own without network, files of this machine, or environment. If none can be made, the run ends.
"""

import asyncio
import functools
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tepo_megatron.rewards.grading import sandbox
from tepo_megatron.rewards.grading.programs import find_program
from tepo_megatron.rollout.conversation import Conversation

MOST_CALLS = 4  # of a sample: the demo's longest chain of operations
MOST_CHARS = 2000  # of an output that the model reads
LIMITS = sandbox.Limits(cpu_seconds=2, wall_seconds=10, memory_mib=256, output_bytes=100_000)
REASONS = {
    "timeout": "it took too long",
    "output": "it wrote too much",
    "processes": "it started too many processes",
    "memory": "it took too much memory",
}
# Threads, because each call waits for a process. Programs beyond the number of cores wait here, before their time counts.
_POOL = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="python-tool")
_CHECK = threading.Lock()


async def expressions(conversation: Conversation) -> None:
    """Run one sample of the demo; `rollout.function` of `python_tool.yaml` names this function."""
    call = conversation.encode("=")  # one token, at which a turn ends
    for _ in range(MOST_CALLS):
        turn = await conversation.generate(stop_token_ids=call)
        if not turn.text.endswith("="):
            return  # the answer is complete, or was cut off
        expression = conversation.text.removesuffix("=").rpartition("=")[2]
        conversation.append(await in_thread(value_of, expression))
    await conversation.generate()


async def code_blocks(conversation: Conversation) -> None:
    """Run one sample of a chat model, which ends with its first turn that has no closed code block."""
    for _ in range(MOST_CALLS):
        turn = await conversation.generate()
        program = find_program(turn.text)
        if program is None or turn.stop_reason != "stop":
            return
        output = without_special_tokens(conversation, await in_thread(output_of, program))
        conversation.append(f"\n<|im_start|>user\nOutput:\n{output}<|im_end|>\n<|im_start|>assistant\n")
    await conversation.generate()


async def in_thread(function: Callable[[str], str], text: str) -> str:
    """Return `function(text)`, computed in a thread while other conversations go on.

    Args:
        function: One of the functions below.
        text: Its argument.
    """
    return await asyncio.get_running_loop().run_in_executor(_POOL, function, text)


def value_of(expression: str) -> str:
    """Return the integer that Python prints for an expression; "?" if it prints none."""
    try:
        return _printed(expression)
    except TimeoutError:
        return "?"


@functools.lru_cache(2**14)
def _printed(expression: str) -> str:
    """Return the value of an expression. It is cached, since the demo's have no effects and recur thousands of times.

    Raises TimeoutError if a limit ended the program: that may be the machine's fault, and is not cached.
    """
    finished = _run(f"print({expression})")
    if finished.why != "exited":
        raise TimeoutError(finished.why)
    printed = finished.stdout.decode(errors="replace").strip()
    return printed if finished.well and re.fullmatch(r"-?\d{1,9}", printed, re.ASCII) else "?"


def output_of(program: str) -> str:
    """Return what a program wrote to stdout, and, if it failed, the end of stderr or the limit that ended it."""
    finished = _run(program)
    output = finished.stdout.decode(errors="replace")
    if len(output) > MOST_CHARS:
        output = f"{output[:MOST_CHARS]}\n({len(output) - MOST_CHARS} more characters)"
    if finished.why != "exited":
        return f"{output}\n(stopped: {REASONS[finished.why]})"
    return output if finished.well else f"{output}\n{finished.stderr.decode(errors='replace')[-MOST_CHARS:]}"


def without_special_tokens(conversation: Conversation, text: str) -> str:
    """Return a text without special tokens, so that a program's output cannot end its turn and speak for others.

    Args:
        conversation: It has the tokenizer.
        text: The output of a program.
    """
    for _ in range(MOST_CHARS):  # what is left when one token is taken out may be another
        plain = conversation.decode(conversation.encode(text))
        if plain == text:
            return text
        text = plain
    return ""


def _run(program: str) -> sandbox.Finished:
    with _CHECK:
        _check()
    return sandbox.run([sandbox.PROGRAM], {sandbox.PROGRAM: program.encode(errors="replace")}, b"", LIMITS)


@functools.cache
def _check() -> None:
    """Raise OSError if no sandbox can be made here: else each program would seem to fail by itself."""
    sandbox.check()
