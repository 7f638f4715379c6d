"""Every graded sample of a benchmark, one line of JSON each. Results are computed from these lines, now and later."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tepo_megatron.base import records
from tepo_megatron.base.errors import DataError
from tepo_megatron.base.seeding import derive_seed
from tepo_megatron.engines.engine import Sampler
from tepo_megatron.evaluation.benchmarks import Problems
from tepo_megatron.evaluation.held_out import sample_and_grade
from tepo_megatron.rewards.grading.answers import last_boxed
from tepo_megatron.rewards.terms import Decode, WeightedReward


@dataclass(frozen=True)
class BenchmarkSample:
    """One graded sample."""

    problem: int  # row of the dataset, from 0
    sample: int  # index among the problem's samples, from 0
    score: float  # 1 or 0; of a file the value of the first of `reward.terms`
    status: str  # reason for the score (`rewards/local.py`)
    answer: str | None  # content of the last box, None without one
    gold: str
    tokens: int  # length of the response in tokens
    stop: str  # "stop", or "length" if the response was cut off
    text: str
    reward: float | None = None  # weighted sum of `reward.terms`; None in files of earlier versions


def sample_benchmark(
    problems: Problems,
    engine: Sampler,
    reward: WeightedReward,
    decode: Decode,
    stop_token_ids: tuple[int, ...],
    seed: int,
    *,
    max_failed_share: float,
) -> list[BenchmarkSample]:
    """Sample all problems of a benchmark and grade the responses; return the samples in the order of the problems.

    They depend only on (weights, protocol, seed), and the random numbers that they use affect nothing else. A file has those
    of `data.eval` in a run.
    Raises as `sample_and_grade`.
    """
    sampling = problems.sampling(stop_token_ids)
    rollouts = sample_and_grade(
        engine,
        reward,
        problems.prompts,
        sampling,
        derive_seed(seed, "evaluation") if problems.entry.is_file else derive_seed(seed, "benchmark", problems.name),
        what=f"evaluation of {problems.name}",
        max_failed_share=max_failed_share,
    )
    samples = []
    for place, rollout in enumerate(rollouts):
        text = decode(rollout.response_ids)
        samples.append(
            BenchmarkSample(
                problem=rollout.prompt_id,
                sample=place % sampling.samples,
                score=rollout.score,
                status=rollout.status,
                answer=last_boxed(text),
                gold=rollout.answer,
                tokens=rollout.response_length,
                stop=rollout.stop_reason,
                text=text,
                reward=rollout.reward,
            )
        )
    return samples


def to_lines(samples: Iterable[BenchmarkSample]) -> bytes:
    """Return the samples as JSON lines."""
    lines = (json.dumps(dataclasses.asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
    return "".join(lines).encode(errors="surrogatepass")


def read_samples(path: Path) -> list[BenchmarkSample]:
    """Return the samples that `to_lines` wrote, each once, and warn of faults of the file.

    A problem that lost some of its samples is left out, so that every mean is over equally many samples.

    Raises DataError that names the file if it cannot be read or holds no sample.
    """
    samples, faults = load_samples(path)
    counts = Counter(sample.problem for sample in samples)
    k = max(counts.values())
    if short := sorted(problem for problem, count in counts.items() if count < k):
        rest = ", ..." if len(short) > 5 else ""
        faults.append(f"problems without all of their {k} samples are left out: {', '.join(map(str, short[:5]))}{rest}")
    records.report(path, faults)
    return [sample for sample in samples if counts[sample.problem] == k]


def load_samples(path: Path) -> tuple[list[BenchmarkSample], list[str]]:
    """Return every readable sample once, and one sentence per fault of the file. Raises as `read_samples`."""
    try:
        samples, faults = records.read_rows(path, _sample)
    except OSError as e:
        raise DataError(f"{path}: cannot read the samples ({e.strerror}); give the folder of an evaluation") from None
    if not samples:
        what = f" ({faults[0]})" if faults else ""
        raise DataError(f"{path}: there is no sample in it{what}; make the evaluation again")
    once = {(sample.problem, sample.sample): sample for sample in samples}
    if len(once) < len(samples):
        faults.append(f"{len(samples) - len(once)} samples are in the file twice; the later line counts")
    return [once[key] for key in sorted(once)], faults


def _sample(row: Any) -> BenchmarkSample:
    """Return the sample in a JSON object. Raises ValueError or TypeError for an invalid one."""
    sample = BenchmarkSample(**row)
    if type(sample.problem) is not int or type(sample.sample) is not int or type(sample.tokens) is not int:
        raise ValueError("its problem, sample or tokens is no integer")
    if not all(type(text) is str for text in (sample.status, sample.gold, sample.stop, sample.text)):
        raise ValueError("its status, gold, stop or text is no text")
    if sample.answer is not None and type(sample.answer) is not str:
        raise ValueError("its answer is no text")
    for value in (sample.score, 0.0 if sample.reward is None else sample.reward):
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"its score or reward is {value!r}")
    return sample
