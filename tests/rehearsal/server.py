"""A server of the rehearsal, with vLLM's routes and binary answers: python -m tests.rehearsal.server PORT HOST MODEL

A sample depends on (seed, prompt) alone. It ends with an answer to the prompt's fraction that is right or wrong, as the seed
says; at some prompts all samples are. Asked to stop at another token, it may end with a sum for the agent's calculator.
"""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tepo_megatron.wire.receiver.binary_answer import CONTENT_TYPE, Sample, encode, ids_crc
from tests.counting_servers import CountingServer

TIMES = yaml.safe_load(Path(__file__).with_name("times.yaml").read_text())
TENSORS = 443  # of Qwen3-14B
MEAN_TOKENS, SPREAD = 2048, 0.8  # of a response, log-normal; `tepo plan` assumes the mean
PROBLEM = re.compile(r"(\d+)/(\d+)=\?")


class RehearsalServer(CountingServer):
    """The server. It takes an update only if all tensors of the model came."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
        self.vocab_size, self.ids = len(vocabulary), {token: i for token, i in vocabulary.items() if len(token) == 1}
        self.characters = {i: token for token, i in self.ids.items()}
        self.config = json.loads((model / "config.json").read_text())
        self.label, self.names = "default", set[str]()

    async def respond(self, path: str, body: dict[str, Any]) -> tuple[str, bytes]:
        if path != "/v1/completions":
            return await super().respond(path, body)
        label, samples = self.label, [self.sample(body, body["prompt"], k) for k in range(body["n"])]
        await asyncio.sleep(TIMES["decode_per_token"] * max(sample.ids_T.size for sample in samples))
        assert label == self.label, "the weights changed while it sampled"
        return CONTENT_TYPE, encode(samples)

    def sample(self, body: dict[str, Any], prompt: list[int], k: int) -> Sample:
        chance = np.random.default_rng([body["seed"] + k, ids_crc(prompt)])
        a, b = map(int, PROBLEM.search("".join(self.characters.get(i, "") for i in prompt)).groups())
        right = chance.random() < (0.0, 1.0, 0.4, 0.5, 0.6)[(7 * a + b) % 5]
        form = chance.choice([f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}", f"{3 * a}/{3 * b}"]) if right else f"{a + 1}/{b}"
        end = [*(self.ids[c] for c in f"\\boxed{{{form}}}"), self.config["eos_token_id"]]
        if self.ids["="] in body["stop_token_ids"] and chance.random() < 0.5:
            end = [self.ids[c] for c in "1+2="]
        length = max(len(end), round(chance.lognormal(np.log(MEAN_TOKENS) - SPREAD**2 / 2, SPREAD)))
        ids = np.append(chance.integers(64, self.vocab_size, length - len(end)), end)[: body["max_tokens"]].astype(np.int32)
        logprobs = -chance.exponential(0.5, ids.size).astype(np.float32)
        reason = "stop" if length <= body["max_tokens"] else "length"
        return Sample(reason, self.label, len(prompt), ids_crc(prompt), ids, logprobs)

    def answer(self, path: str, body: dict[str, Any]) -> object:
        if path == "/update_weights":
            sources = map(json.loads, body["update_info"]["sources"])
            self.names |= {tensor["name"] for source in sources for tensor in source["contents"]}
        elif path == "/finish_weight_update":
            assert len(self.names) == TENSORS, f"{len(self.names)} tensors came"
            self.label, self.names = body["weight_version"], set()
        answers = {
            "/reset_prefix_cache": {"success": True},
            "/weight_info": {"weight_version": self.label},
            "/v1/models": {"data": [{"max_model_len": self.config["max_position_embeddings"]}]},
            "/counts": {"most_open": self.most_open, "requests": self.requests, **self.largest},
        }
        return answers.get(path) or super().answer(path, body)


if __name__ == "__main__":
    loop = asyncio.new_event_loop()
    loop.run_until_complete(RehearsalServer(Path(sys.argv[3])).start(sys.argv[2], int(sys.argv[1])))
    loop.run_forever()
