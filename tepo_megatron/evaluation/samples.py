"""Every sample of a benchmark, graded, as one line of JSON: what results are computed from, now and later."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """What `to_lines` made. Raises DataError naming the file, and the line that is malformed."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise DataError(f"{path}: cannot read the samples ({e.strerror}); give the folder of an evaluation") from None
    samples = []
    for number, line in enumerate(lines, start=1):
        try:
            samples.append(_sample(json.loads(line.decode(errors="surrogatepass"))))
        except (ValueError, TypeError) as e:
            raise DataError(f"{path}:{number}: not a sample ({e}); make the evaluation again") from None
    if not samples:
        raise DataError(f"{path}: there is no sample in it; make the evaluation again")
    return samples


def _sample(row: Any) -> Sample:
    if not isinstance(row, dict):
        raise ValueError("it is no object")
    sample = Sample(**row)
    if not isinstance(sample.score, (int, float)) or not 0 <= sample.score <= 1:
        raise ValueError(f"its score is {sample.score!r}")
    return sample
