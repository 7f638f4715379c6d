"""Predict what the judges that a run serves take: GPUs of their own, memory, and seconds of a step (docs/judges.md)."""

from collections.abc import Iterator
from dataclasses import dataclass

from tepo_megatron.config import RewardConfig
from tepo_megatron.config.judge import JudgeTermConfig
from tepo_megatron.errors import ConfigError
from tepo_megatron.plan.compute import MachineModel
from tepo_megatron.plan.engine_memory import generating
from tepo_megatron.plan.generation import EngineModel
from tepo_megatron.plan.gpus import GIB
from tepo_megatron.plan.memory_parts import ELEMENT, MemoryState, PlannedModel
from tepo_megatron.plan.models import read_model
from tepo_megatron.plan.workload import Workload

_LETTERS = 4  # of a token, for the length of the question's own text


@dataclass(frozen=True)
class JudgeLoad:
    """A judge that the run serves.

    Attributes:
        gpus: Its GPUs, which no other part of the run uses.
        memory: Memory of each of them.
        seconds: From the first question of a step to the last verdict, if all responses were there at once and each verdict
            took `max_tokens`.
    """

    name: str
    gpus: int
    memory: MemoryState
    seconds: float

    def fault(self, machine: MachineModel) -> str:
        """Return why the judge does not fit its GPUs; empty if it does."""
        total, there = self.memory.total, machine.gpu.memory
        if total <= there and self.memory.parts["KV cache"] > 0:
            return ""
        weights = self.memory.parts["engine's weights"] / GIB
        return f"{self.name}: {weights:.1f} GiB of weights on each GPU leave no memory for a KV cache; raise its server.tp"


def judge_loads(reward: RewardConfig, responses: int, machine: MachineModel, work: Workload) -> Iterator[JudgeLoad]:
    """Yield the judges whose sizes are known."""
    for number, term in reward.judges.items():
        if (model := judge_model(term)) is None:
            continue
        dtype = term.server.precision or "bf16"
        memory = generating(term.server, dtype, model, machine.gpu, machine.assumed)
        at_once = min(term.server.concurrency, machine.assumed.engine_sequences)
        cache = max(1.0, memory.parts["KV cache"])
        engine = EngineModel(model, machine, term.server.tp, cache, at_once, ELEMENT[dtype])
        own = sum(len(template) for _, template in term.messages) // _LETTERS
        question = min(term.max_prompt_tokens, own + work.prompt + work.response)
        questions = -(-responses * term.verdicts // term.servers)
        seconds = engine.seconds(question, questions, [term.max_tokens] * questions)
        yield JudgeLoad(f"the judge reward.terms[{number}] ({term.model})", term.gpus, memory, seconds)


def judge_model(term: JudgeTermConfig) -> PlannedModel | None:
    """Return the model of a judge; None if others serve it, or its sizes are not known here."""
    if term.url is not None:
        return None
    try:
        return PlannedModel(*read_model(term.model))
    except ConfigError:
        return None


def judge_lines(loads: list[JudgeLoad]) -> Iterator[str]:
    """Yield a line for each judge."""
    for load in loads:
        parts = {name: size / GIB for name, size in load.memory.parts.items()}
        weights = parts["engine's weights"]
        yield (
            f"{load.name}: {load.gpus} more GPUs, on each {weights:.1f} GiB of weights and "
            f"{parts['KV cache']:.1f} GiB of KV cache; a step's verdicts take {load.seconds:.1f} s at most"
        )
