"""A user's own generation function with a real vLLM server: masks, and log-probs of every turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tepo_megatron.rollout.custom import CustomRollouts, load_function
from tepo_megatron.types import Rollout, SamplingParams
from tests.server.served import EOS, MAX_LOGPROB_DIFF, Served, logprob_diff, make_prompts, save_weights, serve
from tests.tiny import char_tokenizer, tiny_qwen3

pytestmark = [pytest.mark.server, pytest.mark.full]
TOKENIZER = char_tokenizer()
TOOL = "(=42)"
TURN, MOST = 6, 24
TWO_TURNS = f"""
async def agent(conversation):
    turn = await conversation.generate(max_tokens={TURN})
    if turn.stop_reason == "length":
        conversation.append("{TOOL}")
        await conversation.generate(stop_token_ids=conversation.encode("e"))
"""
SAMPLING = SamplingParams(samples=3, temperature=0.7, max_tokens=MOST, stop_token_ids=(EOS,))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve("vllm", tmp_path_factory.mktemp("vllm")) as served:
        yield served


@pytest.fixture
def rollouts(served: Served, tmp_path: Path) -> CustomRollouts:
    (tmp_path / "functions.py").write_text(TWO_TURNS)
    function = load_function(f"{tmp_path / 'functions.py'}:agent")
    return CustomRollouts(served.engine, function, encode, TOKENIZER.decode)


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False).input_ids)


def two_turns(made: list[Rollout]) -> list[Rollout]:
    return [r for r in made if r.response_mask_L.diff().sum() == 3]  # segments: prompt, turn, tool, turn


def test_two_turns_have_the_masks_and_log_probs_that_they_should(served: Served, rollouts: CustomRollouts) -> None:
    prompts = make_prompts(16, seed=1)
    made = rollouts.generate(prompts, SAMPLING, seed=3)
    assert [r.prompt_id for r in made] == [p.id for p in prompts for _ in range(SAMPLING.samples)]
    both = two_turns(made)
    assert len(both) > len(made) / 2
    for rollout in both:
        context = len(prompts[[p.id for p in prompts].index(rollout.prompt_id)].token_ids)
        second = context + TURN + len(TOOL)
        assert TOKENIZER.decode(rollout.token_ids_L[context + TURN : second].tolist()) == TOOL
        outside = [*range(context), *range(context + TURN, second)]
        assert (~rollout.response_mask_L).nonzero().flatten().tolist() == outside
        assert (rollout.rollout_logprobs_L[outside] == 0).all()
        assert (rollout.rollout_logprobs_L[rollout.response_mask_L] < 0).all()
        if rollout.stop_reason == "stop":
            assert int(rollout.token_ids_L[-1]) in (EOS, *encode("e"))
        else:
            assert rollout.token_ids_L.numel() == context + MOST
    assert {r.stop_reason for r in both} == {"stop", "length"}
    diff = logprob_diff(served.model, made, SAMPLING.temperature)
    print(f"largest log-prob difference over {sum(r.response_length for r in made)} tokens of two turns: {diff:.1e}")
    assert diff <= MAX_LOGPROB_DIFF
    # the comparison can fail: the second turns without the tool's output are others
    without = [_without_tool(r) for r in both]
    assert logprob_diff(served.model, without, SAMPLING.temperature) > 0.1


def test_samples_repeat_with_their_seed_alone(rollouts: CustomRollouts) -> None:
    prompts = make_prompts(8, seed=4)
    first = [r.token_ids_L.tolist() for r in rollouts.generate(prompts, SAMPLING, seed=5)]
    assert [r.token_ids_L.tolist() for r in rollouts.generate(prompts[:3], SAMPLING, seed=5)] == first[:9]
    assert [r.token_ids_L.tolist() for r in rollouts.generate(prompts, SAMPLING, seed=6)] != first
    assert len({tuple(ids) for ids in first}) > len(first) / 2


def test_new_weights_are_seen_by_all_turns(served: Served, rollouts: CustomRollouts, tmp_path: Path) -> None:
    prompts = make_prompts(8, seed=9)
    rollouts.generate(prompts, SAMPLING, seed=0)  # leaves both turns' contexts in the prefix cache
    new = tiny_qwen3(tmp_path / "new", tied=True, seed=100)
    served.engine.update_weights(save_weights(new, tmp_path, files=2), 1)
    made = rollouts.generate(prompts, SAMPLING, seed=0)
    assert {r.policy_version for r in made} == {1} and two_turns(made)
    assert logprob_diff(new, made, SAMPLING.temperature) <= MAX_LOGPROB_DIFF
    served.model = new


def _without_tool(rollout: Rollout) -> Rollout:
    """Return the rollout with its last turn directly after its first."""
    mask = rollout.response_mask_L.clone()
    mask[: int(mask.nonzero()[0])] = True  # the prompt stays
    return replace(
        rollout,
        token_ids_L=rollout.token_ids_L[mask],
        response_mask_L=rollout.response_mask_L[mask],
        rollout_logprobs_L=rollout.rollout_logprobs_L[mask],
    )
