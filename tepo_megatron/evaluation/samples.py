"""Every sample of a benchmark, graded, as one line of JSON: what results are computed from, now and later."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_megatron import records
from tepo_megatron.errors import DataError
from tepo_megatron.evaluation.problems import Problems
from tepo_megatron.rewards import Reward
from tepo_megatron.rewards.boxed import last_boxed
from tepo_megatron.rollout.engine import RolloutEngine
from tepo_megatron.seeding import derive_seed


@dataclass(frozen=True)
class Sample:
    """problem: the row of the dataset, from 0; sample: of that problem, from 0; score: 1 or 0; status: why (`rewards/math.py`);
    answer: what stands in the last box, None without one; tokens: of the response; stop: "stop", or "length" where it was cut.
    """

    problem: int
    sample: int
    score: float
    status: str
    answer: str | None
    gold: str
    tokens: int
    stop: str
    text: str


def sample_benchmark(
    problems: Problems,
    engine: RolloutEngine,
    reward: Reward,
    decode: Callable[[Sequence[int]], str],
    stop_token_ids: tuple[int, ...],
    seed: int,
) -> list[Sample]:
    """Graded samples of all problems, in their order. They depend on (weights, protocol, seed) alone, and nothing else hangs on
    the random numbers that they take. Raises RolloutError, RewardError.
    """
    sampling = problems.sampling(stop_token_ids)
    rollouts = engine.generate(problems.prompts, sampling, derive_seed(seed, "benchmark", problems.name))
    samples = []
    for place, rollout in enumerate(reward.score(rollouts)):
        text = decode(rollout.response_ids)
        samples.append(
            Sample(
                problem=rollout.prompt_id,
                sample=place % sampling.samples,
                score=rollout.score,
                status=rollout.status,
                answer=last_boxed(text),
                gold=rollout.answer,
                tokens=rollout.response_length,
                stop=rollout.stop_reason,
                text=text,
            )
        )
    return samples


def to_lines(samples: Iterable[Sample]) -> bytes:
    """JSON lines."""
    return "".join(json.dumps(dataclasses.asdict(sample), ensure_ascii=False) + "\n" for sample in samples).encode(
        errors="surrogatepass"
    )


def read_samples(path: Path) -> list[Sample]:
    """What `to_lines` made, every sample once. What is wrong with the file is warned of. A problem that lost some of its
    samples is left out, so that every mean stays one over equally many.

    Raises DataError naming a file that cannot be read, or holds no sample.
    """
    samples, faults = load_samples(path)
    counts: dict[int, int] = {}
    for sample in samples:
        counts[sample.problem] = counts.get(sample.problem, 0) + 1
    k = max(counts.values())
    if short := sorted(problem for problem, count in counts.items() if count < k):
        rest = ", ..." if len(short) > 5 else ""
        faults.append(f"problems without all of their {k} samples are left out: {', '.join(map(str, short[:5]))}{rest}")
    records.report(path, faults)
    return [sample for sample in samples if counts[sample.problem] == k]


def load_samples(path: Path) -> tuple[list[Sample], list[str]]:
    """Every sample that can be read, once, and what is wrong with the file, a sentence each. Raises as `read_samples`."""
    try:
        found, faults = records.read_rows(path, "problem", _sample)
    except OSError as e:
        raise DataError(f"{path}: cannot read the samples ({e.strerror}); give the folder of an evaluation") from None
    if not found:
        what = f" ({faults[0]})" if faults else ""
        raise DataError(f"{path}: there is no sample in it{what}; make the evaluation again")
    once = {(sample.problem, sample.sample): sample for sample in found}
    if len(once) < len(found):
        faults.append(f"{len(found) - len(once)} samples stand there twice, of which the later line counts")
    return [once[key] for key in sorted(once)], faults


def _sample(row: Any) -> Sample:
    sample = Sample(**row)
    if type(sample.problem) is not int or type(sample.sample) is not int or type(sample.tokens) is not int:
        raise ValueError("its problem, sample or tokens is no integer")
    if not all(type(text) is str for text in (sample.status, sample.gold, sample.stop, sample.text)):
        raise ValueError("its status, gold, stop or text is no text")
    if sample.answer is not None and type(sample.answer) is not str:
        raise ValueError("its answer is no text")
    if not isinstance(sample.score, (int, float)) or not 0 <= sample.score <= 1:
        raise ValueError(f"its score is {sample.score!r}")
    return sample
