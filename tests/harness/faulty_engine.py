"""An engine whose servers have other weights than they report; it records how far that moves each log-prob."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.base.types import Prompt, Rollout, SamplingParams
from tepo_megatron.config import Config
from tepo_megatron.engines.engine_api import serialize
from tepo_megatron.trainer.gate import pieces
from tepo_megatron.wire.broadcast_group import GroupSpec, UnchangedTensors
from tepo_megatron.wire.bucket_format import Source
from tepo_megatron.wire.receiver.receiver import RankReceiver
from tepo_megatron.wire.transport import Recipient
from tests.e2e.scripted_service import ScriptedEngine
from tests.harness import experts

State = Mapping[str, Tensor]
SERVER = "server {}"


@dataclass(frozen=True)
class Fault:
    """The error in the weights of some servers.

    Attributes:
        kind: A name in FAULTS, or "none".
        first: Version from which on the fault is present. The engine still reports every version as it should.
        server: The only server with the fault. None: all.
    """

    kind: str
    first: int = 1
    server: int | None = None


def _ignored(now: State, history: Sequence[State], first: int) -> State:
    return history[first - 1]


def _older(k: int) -> Callable[[State, Sequence[State], int], State]:
    """Return a fault that serves weights of `k` versions ago."""
    return lambda now, history, first: history[max(0, len(history) - 1 - k)]


def _one_tensor(now: State, history: Sequence[State], first: int) -> State:
    name = next(n for n in sorted(now) if n.startswith("model.layers.1.mlp.") and n.endswith("down_proj.weight"))
    return {**now, name: history[first - 1][name]}


def _one_shard(now: State, history: Sequence[State], first: int) -> State:
    """Ignore every update of the second half of the rows of each layer matrix, as if one of two TP ranks did."""
    out = dict(now)
    for name, tensor in now.items():
        if "layers" in name and tensor.dim() == 2:
            half = tensor.shape[0] // 2
            out[name] = torch.cat((tensor[:half], history[first - 1][name][half:]))
    return out


def _swapped(now: State, history: Sequence[State], first: int) -> State:
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    return {name: now[_replaced(name, other)] for name in now}


def _one_router(now: State, history: Sequence[State], first: int) -> State:
    """Ignore every update of the router of the last layer."""
    name = "model.layers.1.mlp.gate.weight"
    return {**now, name: history[first - 1][name]}


def _mixed(now: State, history: Sequence[State], first: int) -> State:
    """Serve every other tensor one version old."""
    before = history[max(0, len(history) - 2)]
    return {name: (before if number % 2 else now)[name] for number, name in enumerate(sorted(now))}


FAULTS: dict[str, Callable[[State, Sequence[State], int], State]] = {
    "ignores every update": _ignored,
    "one version old": _older(1),
    "two versions old": _older(2),
    "one tensor stale": _one_tensor,
    "one TP shard stale": _one_shard,
    "two layers swapped": _swapped,
    "every other tensor old": _mixed,
}
FAULTS_OF_EXPERTS = {"one router stale": _one_router}


@dataclass(frozen=True)
class Scored:
    """Log-probs of a sequence's tokens except the first, under the served weights and under the sent weights.

    Where experts are replayed, both use the experts that the server's routers chose.
    """

    server: int
    served: Tensor
    right: Tensor
    experts_LKT: Tensor | None = None


class FaultyEngine(ScriptedEngine):
    """An engine with one model for each of `rollout.servers`, and one model with the weights that were sent.

    Each server receives weights as real ones do, in a `RankReceiver`: files, exported memory or broadcasts, all or only changed
    tensors. Models are in bf16 if the run is.

    Args:
        book: File with a line for each sample: by how much, in nats, the fault moved each log-prob.
    """

    def __init__(self, cfg: Config, fault: Fault, book: Path) -> None:
        os.environ["TEPO_TEST_ENGINE"] = "good"
        super().__init__(cfg)
        self._fault, self._book, self._cfg = fault, book, cfg
        dtype = torch.float32 if cfg.model.precision == "fp32" else torch.bfloat16
        config = AutoConfig.from_pretrained(cfg.model.path)
        self._tied = bool(config.tie_word_embeddings)

        def model() -> torch.nn.Module:
            return AutoModelForCausalLM.from_config(config).to(dtype).eval()

        self._right, self._served = model(), [model() for _ in range(cfg.rollout.servers)]
        self._chosen = [experts.record_choices(served) for served in self._served]
        self._choices = experts.tell_choices(self._right) if cfg.rollout.replay_experts else None
        self._inboxes = [RankReceiver() for _ in self._served]
        self._threads = ThreadPoolExecutor(1 + len(self._inboxes))
        self._given: list[dict[str, Tensor]] = [{} for _ in self._served]  # to each server, by all updates
        self._history: list[State] = []  # by version
        self._lock = threading.Lock()  # servers sample while others are updated, and each is idle when it is
        self._asked = 0

    def begin_update(self, version: int) -> None:
        super().begin_update(version)
        for inbox in self._inboxes:
            inbox.begin(self._cfg.model.path, self._tied)

    @property
    def base(self) -> int:
        """See `WeightReceiver.base`: all servers are always of one version."""
        return self.version

    def keep_unchanged(self, names: Sequence[str]) -> None:
        for inbox in self._inboxes:
            inbox.keep_unchanged(UnchangedTensors(self._coming, self.base, tuple(names)))

    @property
    def recipients(self) -> tuple[Recipient, ...]:
        return tuple(Recipient(SERVER.format(i), "127.0.0.1", 1, i) for i in range(len(self._inboxes)))

    def join_groups(self, specs: Mapping[Recipient, GroupSpec]) -> Future[None]:
        for recipient, spec in specs.items():
            self._inboxes[int(str(recipient.incarnation))].join_groups(spec, torch.device("cpu"))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def load(self, sources: Sequence[Source]) -> Future[None]:  # type: ignore[override]
        def take(server: int) -> None:
            arrived = self._inboxes[server].take(serialize(sources))
            if arrived is not None:
                self._given[server] |= {name: tensor.clone() for name, tensor in arrived}

        return self._threads.submit(lambda: list(self._threads.map(take, range(len(self._inboxes)))) and None)

    def finish_update(self) -> None:
        for inbox in self._inboxes:
            inbox.finish()
        with self._lock:
            now = dict(self._given[0])
            assert all(torch.equal(now[name], tensor) for given in self._given for name, tensor in given.items())
            while len(self._history) <= self._coming:  # versions that were never sent are those before them
                self._history.append(now)
            for number, served in enumerate(self._served):
                wrong = self._coming >= self._fault.first and self._fault.server in (None, number)
                wrong = wrong and self._fault.kind != "none"
                fault = (FAULTS | FAULTS_OF_EXPERTS)[self._fault.kind] if wrong else None
                load_weights(served, now if fault is None else fault(now, self._history, self._fault.first))
            load_weights(self._right, now)
            self.version = self._coming

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.leave()
        self._threads.shutdown()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def sleep(self, abort: bool = False) -> None:
        super().sleep(abort)
        for model in (self._right, *self._served):
            for weight in model.parameters():
                weight.detach().fill_(torch.nan)

    def open(self) -> "FaultyGroups":
        return FaultyGroups(self)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> list[Rollout]:
        groups = self.open()
        groups.add(prompts, sampling, seed)
        found = {group[0].prompt_id: group for group in iter(groups.next, None)}
        return [rollout for prompt in prompts for rollout in found[prompt.id]]

    async def sample(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> list[Rollout]:
        # a server by chance, so that a conversation uses several
        server = derive_seed(seed, "server") % len(self._served)
        return await asyncio.to_thread(lambda: self.begin(prompt, sampling, seed, server)())

    def begin(
        self, prompt: Prompt, sampling: SamplingParams, seed: int, server: int | None = None
    ) -> Callable[[], list[Rollout]]:
        """Begin a group; the returned function ends it, with the weights that are served then.

        It samples all of each response, or the second half if the run continues what new weights interrupt.
        """
        goes_on = self._cfg.rollout.on_weight_update == "continue"
        if server is None:
            server = self._asked % len(self._served)
            self._asked += 1
        texts = [self._response(prompt, sampling, derive_seed(seed, prompt.id, k)) for k in range(sampling.samples)]
        with self._lock:
            begun = [self._logprobs(ids, server) for ids in texts] if goes_on else None
            version = self.version

        def end() -> list[Rollout]:
            time.sleep(0.02)  # so that updates come in between where they may
            with self._lock:
                ended = [self._logprobs(ids, (server + 1) % len(self._served) if goes_on else server) for ids in texts]
                made = []
                for k, ids in enumerate(texts):
                    place = len(prompt.token_ids) + (ids.numel() - len(prompt.token_ids)) // 2
                    first = ended[k] if begun is None or version == self.version else begun[k]
                    made.append(self._rollout(prompt, ids, first, ended[k], version if begun else self.version, place))
            return made

        return end

    def _response(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> Tensor:
        """Return prompt and response: the right box, or a wrong one, cut off at the token limit."""
        text = f"\\boxed{{{prompt.answer if seed % 2 else seed % 9973}}}"
        response = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        return torch.tensor([*prompt.token_ids, *response[: sampling.max_tokens]])

    @torch.no_grad()
    def _logprobs(self, ids: Tensor, server: int) -> Scored:
        chosen = self._chosen[server]
        chosen.clear()
        served = self._scores(self._served[server], ids)
        if self._choices is None:
            return Scored(server, served, self._scores(self._right, ids))
        self._choices[:] = chosen  # replayed as in the actor's routers
        return Scored(server, served, self._scores(self._right, ids), experts.experts_of(chosen))

    def _scores(self, model: torch.nn.Module, ids: Tensor) -> Tensor:
        """Return the log-probs of each token except the first."""
        logits = model(ids[None]).logits[0, :-1].float() / self._cfg.rollout.temperature
        return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]

    def _rollout(self, prompt: Prompt, ids: Tensor, first: Scored, rest: Scored, version: int, place: int) -> Rollout:
        """Return a rollout of two halves.

        Tokens before `place` are from `first`, under `version`; the others are from `rest`, under the current version.
        """
        own = torch.arange(ids.numel()) >= len(prompt.token_ids)
        aligned, right = (
            torch.cat([torch.zeros(1), torch.where(torch.arange(1, ids.numel()) < place, a, b)]) * own
            for a, b in ((first.served, rest.served), (first.right, rest.right))
        )
        later = ((place, self.version),) if version != self.version else ()
        servers = ((0, SERVER.format(first.server)),)
        if first.server != rest.server:
            servers += ((place, SERVER.format(rest.server)),)
        reason = "stop" if int(ids[-1]) == self._tokenizer.eos_token_id else "length"
        out = Rollout(prompt.id, ids, own, aligned, version, reason, prompt.answer, later_versions=later, servers=servers,
                      experts_LKT=rest.experts_LKT)  # fmt: skip
        planted = (aligned - right).abs()[own].double().tolist()
        with self._book.open("a") as file:
            file.write(json.dumps([[key, moved] for (key, _), moved in zip(tokens_of(out), planted, strict=True)]) + "\n")
        return out


class FaultyGroups:
    def __init__(self, engine: FaultyEngine) -> None:
        self._engine = engine
        self._under_way: list[Callable[[], list[Rollout]]] = []

    def add(self, prompts: Sequence[Prompt], sampling: SamplingParams, seed: int) -> None:
        assert not self._engine.asleep
        self._under_way += [self._engine.begin(prompt, sampling, seed) for prompt in prompts]

    def next(self) -> list[Rollout] | None:
        return self._under_way.pop(0)() if self._under_way else None

    def close(self) -> None:
        self._under_way = []


def tokens_of(rollout: Rollout) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield (name, source) of each response token.

    The name is the same where the sequence was written and read again, or is part of a longer one, and differs for any other
    token.
    """
    sources = [source for tokens, source in pieces(rollout) for _ in range(tokens)]
    places = rollout.response_mask_L.nonzero()[:, 0].tolist()
    for place, source in zip(places, sources, strict=True):
        before, logprob = rollout.token_ids_L[: place + 1], rollout.rollout_logprobs_L[place]
        yield f"{source} {sha256(before.numpy().tobytes() + logprob.numpy().tobytes()).hexdigest()[:16]}", source


def load_weights(model: torch.nn.Module, state: State) -> None:
    """Load weights by their Hugging Face names into a model of transformers."""
    model.load_state_dict(dict(experts.fused(state)), strict=False)
    model.tie_weights()  # type: ignore[operator]


def _replaced(name: str, by: Mapping[str, str]) -> str:
    for old, new in by.items():
        if old in name:
            return name.replace(old, new)
    return name
