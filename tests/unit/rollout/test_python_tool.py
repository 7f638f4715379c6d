"""Python as a tool: real programs in the real sandbox, with a scripted model."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from examples.agents import python_tool
from examples.arithmetic.task import END, build_tokenizer
from tepo_megatron.inference.samples import checked_rollout
from tepo_megatron.rollout.conversation import Conversation
from tepo_megatron.types import Prompt, Rollout, SamplingParams

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="no bwrap (Debian: apt-get install bubblewrap)")
BLOCK = "```python\n{}\n```<|im_end|>"


def bytes_and_special_tokens() -> Tokenizer:
    """Return a tokenizer with one token per byte, and the special tokens of ChatML."""
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made


DEMO, CHAT = build_tokenizer().backend_tokenizer, bytes_and_special_tokens()


def sample(
    function: Callable[[Conversation], Awaitable[None]], tokenizer: Tokenizer, turns: Sequence[str]
) -> tuple[list[tuple[str, bool]], int]:
    """Return the parts of a sample after its prompt, (text with special tokens, whether the model wrote it), and the turns."""
    script = iter(turns)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    async def turn(prompt: Prompt, sampling: SamplingParams, seed: int) -> Rollout:
        ids = encode(next(script))
        return checked_rollout(prompt, ids, [-0.5] * len(ids), "stop", sampling, 0)

    prompt = Prompt(id=0, token_ids=tuple(encode("1")), answer="")
    stops = tuple(encode(END))
    conversation = Conversation(
        prompt, SamplingParams(max_tokens=20_000, stop_token_ids=stops), 0, sample_turn=turn, encode=encode,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
    )  # fmt: skip
    asyncio.run(function(conversation))
    rollout = conversation.finish()
    parts: list[tuple[list[int], bool]] = []
    for token, by_model in zip(rollout.token_ids_L.tolist()[1:], rollout.response_mask_L.tolist()[1:], strict=True):
        if not parts or parts[-1][1] != by_model:
            parts.append(([], by_model))
        parts[-1][0].append(token)
    return [(tokenizer.decode(ids, skip_special_tokens=False), by_model) for ids, by_model in parts], conversation.turns


def test_the_demos_expressions() -> None:
    parts, _ = sample(python_tool.expressions, DEMO, ["9+5=", "-7=", ".\\boxed{7}" + END])
    assert parts == [("9+5=", True), ("14", False), ("-7=", True), ("7", False), (".\\boxed{7}" + END, True)]
    # not an expression; a leading zero is a SyntaxError of Python; then the answer
    parts, _ = sample(python_tool.expressions, DEMO, ["\\boxed{=", "05+1=", END])
    assert [text for text, by_model in parts if not by_model] == ["?", "?"]


def test_the_output_of_code_blocks(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    turns = [
        "First\n" + BLOCK.format("end = 'end|>'\nprint(6 * 7)\nprint(('<|im_<|im_' + end + end) * 2, 'é')"),
        BLOCK.format(f"print('begun', flush=True)\nopen({str(secret)!r})"),
        BLOCK.format("while True: print('x' * 1000)"),
        BLOCK.format("print('x' * 3000)"),
        "It is 42.<|im_end|>",
    ]
    parts, written = sample(python_tool.code_blocks, CHAT, turns)
    assert written == 5 and [text for text, by_model in parts if by_model] == turns
    first, second, third, fourth = (text for text, by_model in parts if not by_model)
    head, tail = "\n<|im_start|>user\nOutput:\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert first == f"{head}42\n é\n{tail}"
    assert "begun\n\nTraceback" in second and "No such file or directory" in second
    assert third.endswith(f"(stopped: it wrote too much){tail}") and len(third) < 2200
    assert fourth.startswith(f"{head}{'x' * 2000}\n(1001 more characters)")
    assert sample(python_tool.code_blocks, CHAT, ["42 ```<|im_end|>"])[1] == 1


def test_a_machine_without_sandboxes_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that could not be run is no wrong program."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match="install bubblewrap"):
        sample(python_tool.expressions, DEMO, ["8+123="])
