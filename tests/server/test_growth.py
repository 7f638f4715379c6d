"""A real vLLM that is started again because its memory grew samples what it would have sampled otherwise, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.server.served import MAX_LOGPROB_DIFF, SAMPLING, logprob_diff, make_prompts, save_weights, serve, server_processes
from tests.tiny import tiny_qwen3

pytestmark = [pytest.mark.server, pytest.mark.full]
A_PAGE = 4096 / 2**30  # GiB; each step of a young server takes some more


def test_samples_are_the_same_bits_with_and_without_restarts(tmp_path: Path) -> None:
    with serve("vllm", tmp_path, restart_after_growth_gib=A_PAGE) as served:  # `serve` has restarts=0
        engine, prompts = served.engine, make_prompts(12, seed=1)
        models = [served.model, tiny_qwen3(tmp_path / "other", seed=1)]
        files = []
        for i, model in enumerate(models):
            (tmp_path / str(i)).mkdir()
            files.append(save_weights(model, tmp_path / str(i), files=2))
        made, pids = [], []
        for version in range(4):  # the weights in turn: those of the first two steps, and again after a restart
            engine.update_weights(files[version % 2], version)
            assert not engine.needs_weights
            pids.append(server_processes(engine)[1].pid)
            made.append(engine.generate(prompts, SAMPLING, seed=version % 2))
            assert {r.policy_version for r in made[-1]} == {version}
        assert pids[0] == pids[1] != pids[2] == pids[3] and engine.restarts == 1
        (event,) = engine.take_events()
        assert "after its first requests: it has grown by more than" in event
        for before, after in zip(made[:2], made[2:], strict=True):
            assert [r.response_ids for r in after] == [r.response_ids for r in before]
            for a, b in zip(after, before, strict=True):
                assert torch.equal(a.rollout_logprobs_L, b.rollout_logprobs_L)
        assert [r.response_ids for r in made[0]] != [r.response_ids for r in made[1]]
        assert max(logprob_diff(models[i % 2], made[i], SAMPLING.temperature) for i in range(4)) <= MAX_LOGPROB_DIFF
