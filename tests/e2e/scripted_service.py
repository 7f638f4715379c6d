"""A service whose engine is scripted instead of vLLM: all else of a run is real (launcher, ranks, grading, updates, files).

`TEPO_TEST_ENGINE` says how the engine behaves: "good", or what goes wrong with it in step 2.
"""

import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tepo_megatron.base.errors import RolloutError
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import Config
from tepo_megatron.engines.engine import EngineReport
from tepo_megatron.service.service import main
from tests.scripted_groups import ScriptedGroups


class ScriptedEngine:
    """An engine that answers with a box, right or wrong at random, and log-probs of the weights that it received."""

    def __init__(self, cfg: Config) -> None:
        self._behaviour = os.environ["TEPO_TEST_ENGINE"]
        self._tokenizer = AutoTokenizer.from_pretrained(cfg.model.path)
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(cfg.model.path)).float().eval()
        self.version = -1
        self._loaded: dict[str, torch.Tensor] = {}  # in the update under way
        self._weights = threading.Lock()  # ahead of training another thread samples: no sample is of two versions

    needs_weights = False
    restarts = 0
    asleep: tuple[str, ...] = ()

    def sleep(self, abort: bool = False) -> None:
        assert not self.asleep
        self.asleep = ("weights", "kv_cache")
        for weight in self._model.parameters():  # they are gone
            weight.detach().fill_(torch.nan)

    def wake(self, part: str) -> None:
        assert part == self.asleep[0]
        self.asleep = self.asleep[1:]

    def resident_bytes(self) -> int:
        return 2**20

    def server_metrics(self) -> dict[str, float]:
        return {}

    def report(self, seconds: float) -> EngineReport:
        return EngineReport([], 0, self.version, {})

    def take_events(self) -> list[str]:
        return []

    def start(self) -> None: ...

    def wait_ready(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None: ...

    def begin_update(self, version: int) -> None:
        assert "weights" not in self.asleep
        self._coming, self._loaded = version, {}

    def abandon_update(self) -> None:
        self._loaded = {}

    def load(self, files: Sequence[Path]) -> Future[None]:
        self._loaded |= {name: t for file in files for name, t in load_file(file).items()}
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def finish_update(self) -> None:
        self.update_weights([], self._coming)

    def update_weights(self, files: Sequence[Path], version: int) -> None:
        """Serve these files, and for other tensors what was loaded before."""
        self.load(files)
        with self._weights:
            if not (self._behaviour == "stale" and version > 0):
                self._model.load_state_dict(self._loaded, strict=False)
                self._model.tie_weights()
            self.version = version

    def open(self) -> ScriptedGroups:
        return ScriptedGroups(self.generate)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        assert not self.asleep
        if self._behaviour == "dies" and self.version >= 1:
            raise RolloutError("the inference server was killed by SIGKILL while it generated; its log ends with: ...")
        if self._behaviour == "slow":
            time.sleep(0.5)
        chance = random.Random(seed)
        uniform = self._behaviour == "uniform"
        return [self._sample(p, uniform or chance.random() < 0.5) for p in prompts for _ in range(sampling.samples)]

    @torch.no_grad()
    def _sample(self, prompt: Prompt, right: bool) -> Rollout:
        text = f"\\boxed{{{prompt.answer if right else '99'}}}"
        if self._behaviour == "programs":
            text = f"```\nprint({'input()' if right else '99'})\n```"
        response = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        ids = torch.tensor([*prompt.token_ids, *response])
        with self._weights:
            version, logits = self.version, self._model(ids[None]).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        mask = torch.arange(ids.numel()) >= len(prompt.token_ids)
        aligned = torch.cat([torch.zeros(1), logprobs]) * mask
        return Rollout(prompt.id, ids, mask, aligned, version, "stop", prompt.answer)


if __name__ == "__main__":
    main(ScriptedEngine)
