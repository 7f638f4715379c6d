"""A user's own generation function: what it adds is marked rightly, repeats, and fails with an error that names it."""

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.arithmetic.task import build_tokenizer
from tepo_megatron.base.errors import ConfigError, RolloutError
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams, TrainBatch
from tepo_megatron.config import LimitsConfig
from tepo_megatron.engines.engine import GroupStream
from tepo_megatron.engines.samples import checked_rollout
from tepo_megatron.ops.alignment import Alignment
from tepo_megatron.ops.packing import pack
from tepo_megatron.rollout.custom import CustomRollouts, load_function
from tests.unit.rollout.test_fleet import behave, fleet, mid_sampling, process
from tests.zigzag import shard_zigzag_packed

TOKENIZER = build_tokenizer()
PROMPTS = [Prompt(id=10 + i, token_ids=(4, 5, 6)[: 1 + i % 3], answer=str(i)) for i in range(12)]
SAMPLING = SamplingParams(samples=3, max_tokens=20)
HEADER = "import asyncio\nfrom tepo_megatron.rollout.conversation import Conversation, OutOfTokens\n"
TWO_TURNS = """
async def agent(conversation: Conversation) -> None:
    await conversation.generate(max_tokens=3)
    conversation.append([50 + len(conversation.prompt.token_ids), 9])
    await conversation.generate(max_tokens=4)
    conversation.append([8, 8])
"""


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False).input_ids)


def decode(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


class InProcess:
    """A sampler without a server: `write` continues a context, given the seed and the most tokens."""

    def __init__(self, write: Callable[[Prompt, SamplingParams, int], tuple[list[int], str]]) -> None:
        self.write = write
        self.version, self.asked = 3, 0

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        self.asked += 1
        assert sampling.samples == 1
        await asyncio.sleep(0)
        ids, stop_reason = self.write(prompt, sampling, seed)
        logprobs = [-0.5 - 0.25 * self.asked] * len(ids)
        return [checked_rollout(prompt, ids, logprobs, stop_reason, sampling, self.version)]

    def generate(self, *_: Any) -> list[Rollout]:
        raise AssertionError("past the function")

    def open(self) -> GroupStream:
        raise AssertionError("past the function")


def count_up(prompt: Prompt, sampling: SamplingParams, seed: int) -> tuple[list[int], str]:
    """Write as many tokens as allowed, each with the number of its position."""
    start = len(prompt.token_ids)
    return list(range(start, start + sampling.max_tokens)), "length"


def written(folder: Path, source: str) -> str:
    """A file with `agent`, as `rollout.function` names it."""
    file = folder / "functions.py"
    file.write_text(HEADER + source)
    return f"{file}:agent"


@contextmanager
def custom(engine: Any, spec: str) -> Iterator[CustomRollouts]:
    with CustomRollouts(engine, load_function(spec), encode, decode) as made:
        yield made


def run(folder: Path, source: str, sampling: SamplingParams = SAMPLING, write: Any = count_up) -> Rollout:
    """The sample that `agent` makes of the prompt (4, 5)."""
    engine = InProcess(write)
    with custom(engine, written(folder, source)) as rollouts:
        return rollouts.generate([Prompt(7, (4, 5), "9")], SamplingParams(1, 1.0, sampling.max_tokens), seed=0)[0]


def agent(body: str) -> str:
    return "async def agent(conversation: Conversation) -> None:\n" + "".join(f"    {line}\n" for line in body.splitlines())


# what a sample is made of


def test_what_the_model_wrote_and_what_it_did_not(tmp_path: Path) -> None:
    rollout = run(tmp_path, TWO_TURNS)
    assert rollout.token_ids_L.tolist() == [4, 5, 2, 3, 4, 52, 9, 7, 8, 9, 10]  # what follows the last turn is left out
    assert rollout.response_mask_L.tolist() == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 4
    assert rollout.rollout_logprobs_L.tolist() == [0, 0, -0.75, -0.75, -0.75, 0, 0, -1, -1, -1, -1]
    assert rollout.token_ids_L.dtype == torch.int64 and rollout.rollout_logprobs_L.dtype == torch.float32
    assert (rollout.prompt_id, rollout.answer, rollout.policy_version, rollout.stop_reason) == (7, "9", 3, "length")
    assert rollout.response_ids == [2, 3, 4, 7, 8, 9, 10] and rollout.status == "ungraded"


def test_the_token_limit_is_that_of_the_whole_sample(tmp_path: Path) -> None:
    """However much the function wants, prompt + max_tokens is the most; the model always gets the last token."""
    body = "while True:\n    await conversation.generate(max_tokens=3)\n    conversation.append([9, 9])"
    rollout = run(tmp_path, agent(body), SamplingParams(max_tokens=14))
    assert rollout.response_mask_L[2:].tolist() == ([True] * 3 + [False] * 2) * 2 + [True] * 3
    assert rollout.stop_reason == "length"
    full = run(tmp_path, agent("while True:\n    await conversation.generate()"), SamplingParams(max_tokens=14))
    assert full.token_ids_L.numel() == 16 and full.stop_reason == "length"


# what goes wrong


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0", r"prompt 7, sample 0: agent of .*functions\.py failed: ZeroDivisionError: .* at .*functions\.py:4"),
        ("raise SystemExit(3)", r"failed: SystemExit: 3"),
        ("asyncio.current_task().cancel()\nawait asyncio.sleep(0)", r"prompt 7, sample 0: agent of .* was cancelled"),
        ("raise asyncio.CancelledError", "was cancelled"),
        ("async with asyncio.TaskGroup() as tasks:\n    tasks.create_task(asyncio.sleep(0, 1 / 0))", "ZeroDivisionError"),
        ("pass", r"ended before the model wrote anything; let the model write at least one turn"),
        ("conversation.append([9] * 20)", r"append less before it than rollout\.max_response_tokens=20"),
        ("return await conversation.generate()", r"returned Turn\(.*it must return nothing"),
        ("await conversation.generate(max_tokens=0)", r"ValueError: max_tokens=0 must be at least 1"),
        ("conversation.append([9.5])", "TypeError"),
        ("await asyncio.gather(conversation.generate(), conversation.generate())", "RuntimeError: a turn is still running"),
        ("conversation.generate()\nawait asyncio.sleep(0)", "before the model wrote anything"),
        (
            "await conversation.generate(max_tokens=1)\n"
            "tasks = asyncio.create_task(conversation.generate())\nawait asyncio.sleep(0)",
            "returned too early: a turn is still running",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine 'Conversation.generate' was never awaited")
def test_a_function_that_fails_loses_its_sample_with_a_reason_that_names_it(body: str, message: str, tmp_path: Path) -> None:
    lost = run(tmp_path, agent(body))
    assert re.search(message, lost.failure) and lost.response_length == 0 and lost.token_ids_L.tolist() == [4, 5]


def test_the_failure_of_the_engine_cannot_be_passed_over(tmp_path: Path) -> None:
    def lost(prompt: Prompt, sampling: SamplingParams, seed: int) -> tuple[list[int], str]:
        if len(prompt.token_ids) > 2:
            raise RolloutError("the inference server is gone")
        return [9], "length"

    body = """
await conversation.generate(max_tokens=1)
try:
    await conversation.generate()
except Exception:
    {}"""
    for then in ("pass", "raise KeyError(1)"):
        with pytest.raises(RolloutError, match=r"^the inference server is gone$"):
            run(tmp_path, agent(body.format(then)), write=lost)


def test_a_sample_is_made_again_when_the_weights_change_between_its_turns(tmp_path: Path) -> None:
    engine = InProcess(count_up)

    def write(prompt: Prompt, sampling: SamplingParams, seed: int) -> tuple[list[int], str]:
        seeds.append(seed)
        engine.version = 3 if engine.asked == 1 else 4
        return count_up(prompt, sampling, seed)

    engine.write, seeds = write, []
    with custom(engine, written(tmp_path, TWO_TURNS)) as made:
        (rollout,) = made.generate(PROMPTS[:1], SamplingParams(1, 1.0, 20), seed=0)
        again = "prompt 10: version 4 of the weights wrote on after version 3; sample 0 is made again"
        assert made.take_events() == [again] and made.take_events() == []
    assert rollout.policy_version == 4 and rollout.response_length == 7
    assert len(seeds) == 4 and seeds[:2] == seeds[2:] and seeds[0] != seeds[1]


@pytest.mark.slow
def test_each_of_several_blocking_samples_is_lost(tmp_path: Path) -> None:
    body = (
        "import time\nif conversation.prompt.id in (10, 12):\n    await asyncio.sleep(0.1)\n    time.sleep(60)\n"
        "await asyncio.sleep(0.2)\nawait conversation.generate()\n"
    )
    function = load_function(written(tmp_path, agent(body)))
    started = time.monotonic()
    with CustomRollouts(InProcess(count_up), function, encode, decode, limits=LimitsConfig(seconds=0.5)) as made:
        samples = made.generate(PROMPTS[:3], SamplingParams(1, 1.0, 20), seed=0)
    assert [bool(sample.failure) for sample in samples] == [True, False, True] and time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("functions.py", r"rollout\.function=functions\.py: not of the form path/to/file\.py:name"),
        ("functions.txt:agent", "not of the form"),
        ("functions.py:a-b", "not of the form"),
        ("nowhere.py:agent", r"there is no file .*nowhere\.py; a path is relative to the folder that the run is started in"),
        ("functions.py:agnet", r"functions\.py defines no agnet; name an async function of it"),
        ("functions.py:plain", r"plain is no async function; write `async def plain\("),
        ("functions.py:number", "number is no async function"),
        ("functions.py:two", r"two must take a conversation and nothing else \(missing a required argument: 'limit'\)"),
        ("broken.py:agent", r"broken\.py cannot be imported \(ModuleNotFoundError: .* at .*broken\.py:2\).*PYTHONPATH"),
        ("unreadable.py:agent", r"unreadable\.py cannot be imported \(SyntaxError"),
        ("leaves.py:agent", r"leaves\.py cannot be imported \(SystemExit"),
    ],
)
def test_what_is_no_function_is_refused(spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "functions.py").write_text(
        "number = 1\ndef plain(conversation): ...\nasync def two(conversation, limit): ...\n"
    )
    (tmp_path / "broken.py").write_text("\nimport no_such_module\n")
    (tmp_path / "unreadable.py").write_text("def (:\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit\n")
    with pytest.raises(ConfigError, match=message):
        load_function(spec)


# with real servers that fail


def ids(rollouts: list[Rollout]) -> list[list[int]]:
    return [r.token_ids_L.tolist() for r in rollouts]


@pytest.mark.slow
def test_samples_repeat_whatever_the_servers_do(tmp_path: Path) -> None:
    spec = written(tmp_path, TWO_TURNS)
    (tmp_path / "one").mkdir()
    with fleet(tmp_path / "one", servers=1) as one:
        rollouts = CustomRollouts(one, load_function(spec), encode, decode).generate(PROMPTS, SAMPLING, seed=7)
    assert [r.prompt_id for r in rollouts] == [p.id for p in PROMPTS for _ in range(3)]
    assert len({tuple(r.response_ids) for r in rollouts}) == len(rollouts)
    halves = [(tuple(r.response_ids[:3]), tuple(r.response_ids[3:6])) for r in rollouts]
    assert all(first != second for first, second in halves)  # each turn has a seed of its own
    expected = ids(rollouts)
    with fleet(tmp_path) as three:
        made = CustomRollouts(three, load_function(spec), encode, decode)
        assert ids(made.generate(PROMPTS, SAMPLING, seed=7)) == expected
        assert ids(made.generate(PROMPTS[::-1], SAMPLING, seed=7)) == list(
            itertools.chain(*[expected[i : i + 3] for i in range(33, -1, -3)])
        )
        assert ids(made.generate(PROMPTS, SAMPLING, seed=8)) != expected
        three.update_weights([], 4)
        for i in range(3):
            behave(three, i, slow=0.4)  # six times at least
        killer = mid_sampling(three, process(three, 1).kill)
        rollouts = made.generate(PROMPTS, SAMPLING, seed=7)
        killer.join()
        assert ids(rollouts) == expected and {r.policy_version for r in rollouts} == {4}
        assert all(r.servers[0][0] == 0 for r in rollouts) and len({name for r in rollouts for _, name in r.servers}) > 1
        assert "is sampled again" in "\n".join(three.take_events())


# what training makes of a mask with holes


def holed(prompt_id: int, seed: int) -> Rollout:
    """Three tokens of prompt, then turns and tool outputs of random lengths; a turn last."""
    chance = torch.Generator().manual_seed(seed)
    parts = [int(torch.randint(1, 6, (), generator=chance)) for _ in range(5)]
    mask = [False] * 3 + list(itertools.chain(*([i % 2 == 0] * n for i, n in enumerate(parts))))
    mask_L = torch.tensor(mask)
    tokens_L = torch.randint(1, 1000, (len(mask),), generator=chance)
    return Rollout(prompt_id, tokens_L, mask_L, -torch.rand(len(mask), generator=chance) * mask_L, 0, "stop")


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_rows_labels_and_log_probs_skip_the_holes(cp: int) -> None:
    rollouts = [holed(i // 2, seed=i) for i in range(6)]
    batch = TrainBatch.build(rollouts, torch.zeros(6))
    assert batch.response_lengths == [int(r.response_mask_L.sum()) for r in rollouts]
    order = [4, 1, 5, 0]
    found: dict[int, tuple[int, int, int]] = {}
    for rank in range(cp):
        m = pack(
            [r.token_ids_L for r in rollouts],
            [r.response_mask_L for r in rollouts],
            batch.first_tokens,
            order,
            Alignment(cp=cp),
            rank,
        )
        place_S = shard_zigzag_packed(torch.arange(int(m.cu_seqlens[-1])), m.cu_seqlens.long(), cp, rank, dim=0)
        assert m.lengths_G.tolist() == [batch.response_lengths[i] for i in order]
        for row, label, g, token, position in zip(m.rows_R, m.labels_R, m.sequence_R, m.token_R, m.position_R, strict=True):
            assert int(token) not in found
            offset = int(place_S[row]) - int(m.cu_seqlens[g])  # in its sequence, of the row that predicts the token
            found[int(token)] = (order[int(g)], offset, int(label))
            assert int(position) == int(token) - batch.first_tokens[order[int(g)]]
    for i in order:
        rollout, first = rollouts[i], batch.first_tokens[i]
        for k, t in enumerate(rollout.response_mask_L.nonzero().flatten().tolist()):
            assert found.pop(first + k) == (i, t - 1, int(rollout.token_ids_L[t]))
            assert batch.rollout_logprobs_N[first + k] == rollout.rollout_logprobs_L[t]
    assert not found
