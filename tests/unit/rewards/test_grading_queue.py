"""One queue grades all groups: nothing waits for a slow answer, judges are asked at once, and workers decode token ids."""

from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tepo_megatron.base.errors import RewardError
from tepo_megatron.base.types import Rollout
from tepo_megatron.config import RewardConfig
from tepo_megatron.config.io import validate_as
from tepo_megatron.data.tokenizer import decoder_file, text_functions
from tepo_megatron.rewards.build import build_reward
from tests.graded import decode, rollout
from tests.unit.rewards.test_remote_reward import Handler, url  # noqa: F401

FUNCTIONS = """
import time

def score(prompt, response, answer):
    while response == "hang":
        time.sleep(1)
    return len(response)

def show(prompt, response, answer):
    assert (prompt, response) == ("ask é", "write \\\\boxed{7}"), (prompt, response)
    return 2
"""


def config(*terms: dict[str, Any], **settings: Any) -> RewardConfig:
    return validate_as(RewardConfig, {"terms": list(terms), **settings}, "config")


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return str(tmp_path / "functions.py")


@pytest.mark.slow
def test_a_group_does_not_wait_for_the_time_out_of_another(functions: str) -> None:
    """Two workers: one has the endless answer, and the other grades everything else, also what the first had been given."""
    hard_seconds = 8.0
    cfg = config({"type": "custom", "function": f"{functions}:score"}, workers=2, timeout_seconds=hard_seconds)
    with build_reward(cfg, decode) as reward:
        reward.score([rollout("warm")] * 200)
        slow = reward.submit([rollout("hang"), *[rollout("aa", prompt_id=1)] * 40])
        quick = [reward.submit([rollout("b" * n, prompt_id=n)] * 16) for n in range(2, 20)]
        wait(quick, hard_seconds)
        assert [future.done() for future in quick] == [True] * len(quick) and not slow.done()
        graded = slow.result(hard_seconds + 20.0)
    assert [(r.reward, r.status) for r in graded] == [(0.0, "timeout"), *[(2.0, "graded")] * 40]
    assert [future.result()[0].reward for future in quick] == list(range(2, 20))


def test_an_error_of_a_judge_reaches_the_group_and_the_others_end() -> None:
    cfg = config({"type": "http", "url": "http://127.0.0.1:9/score", "concurrency": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tepo_megatron.rewards.remote.ATTEMPTS", 1)
        with build_reward(cfg, decode) as reward:
            futures = [reward.submit([rollout("a")]) for _ in range(8)]
            for future in futures:
                with pytest.raises(RewardError, match="attempt 1 of 1"):
                    future.result(60)


def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def sampled(made: PreTrainedTokenizerFast, prompt: str, response: str, answer: str = "7") -> Rollout:
    encode, _ = text_functions(made)
    ids = [*encode(prompt), *encode(response), made.eos_token_id]
    mask_L = torch.arange(len(ids)) >= len(encode(prompt))
    return Rollout(0, torch.tensor(ids), mask_L, torch.zeros(len(ids)), 0, "stop", answer)


def no_decode(ids: object) -> str:
    raise AssertionError("this process decodes")


def test_workers_decode_what_the_policy_wrote(functions: str, url: str) -> None:  # noqa: F811
    """Each kind of term gets the text without special tokens, and this process decodes nothing."""
    made = tokenizer()
    terms = [
        {"type": "math"},
        {"type": "format", "pattern": r"write \\boxed\{7\}", "weight": 10.0},
        {"type": "custom", "function": f"{functions}:show", "weight": 100.0},
        {"type": "http", "url": url, "weight": 1000.0},
    ]
    with decoder_file(made) as file, build_reward(config(*terms, workers=1, timeout_seconds=60.0), no_decode, file) as reward:
        (graded,) = reward.score([sampled(made, "ask é", r"write \boxed{7}")])
        cpu_seconds = reward.cpu_seconds
    assert (graded.status, graded.score, graded.reward) == ("exact", 1.0, 1 + 10 + 200 + 1000 * 15)
    assert Handler.seen[0][1]["samples"] == [{"prompt": "ask é", "response": r"write \boxed{7}", "answer": "7"}]
    assert cpu_seconds > 0
