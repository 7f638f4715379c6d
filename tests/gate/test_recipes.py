"""Every YAML file under examples/ takes two updates equal to the fp64 reference: what ships is what is tested.

On a CPU, with a tiny model of the same family, the layout shrunk, and every default that `platform: cuda` switches on
(`tests/gate/plan.py`). Run with `-s` to see which file is trained by which job.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gate import common, plan, recipes
from tests.gate.data import Material, make_material
from tests.gate.reference import Trained
from tests.gate.world import Job, Outcome, merged, run_jobs
from tests.worlds import run_world

JOBS = 5  # jobs of a world that run in one fork


def _every_part() -> Iterator[tuple[str, int]]:
    """Yield each world's name with the first job of each part of it."""
    for name, jobs in recipes.worlds().items():
        yield from ((name, first) for first in range(0, len(jobs), JOBS))


def parts() -> Iterator[Any]:
    """Yield every part: `make test` takes the first part of three worlds, `make test-fast` that of the smallest one."""
    for name, first in _every_part():
        mark = pytest.mark.slow if first == 0 and name in ("1 rank", "PP2 CP2") else pytest.mark.full
        yield pytest.param(name, first, marks=[] if (name, first) == ("TP2", 0) else [mark])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate")


def _material(folder: Path, job: recipes.JobPlan) -> Material:
    family, tied = job.family
    return make_material(folder, family, tied=tied, layers=2, steps=plan.updates(job.cfg)[2])


@pytest.mark.parametrize(("world", "first"), parts())
def test_recipes_train_to_the_reference(world: str, first: int, folder: Path) -> None:
    """Train in fp32, and in bf16 one job of each kind."""
    plans = recipes.worlds()[world][first : first + JOBS]
    names: list[str] = []  # name of each job, in the order of jobs and expected
    jobs: list[Job] = []
    expected: list[Trained] = []
    in_fp32: list[Callable[[], Trained]] = []
    for number, recipe in enumerate(plans):
        material = _material(folder / f"{world}-{first + number}", recipe)
        serves = _is_first_of_its_kind(recipe)
        exact = plan.on_a_cpu(recipe.cfg, str(material.model), dict(recipe.layout), "fp32")
        names.append(f"{world}: {', '.join(recipe.names)}")
        jobs.append(Job(exact, material.steps, folder / f"{world}-{first + number}" if serves else None))
        expected.append(common.expectation(exact, material))
        in_fp32.append(partial(common.expectation, exact, material, dtype=torch.float32))
        if serves:
            jobs.append(Job(plan.on_a_cpu(recipe.cfg, str(material.model), dict(recipe.layout), "bf16"), material.steps))
            expected.append(expected[-1])
            in_fp32.append(in_fp32[-1])
            names.append(names[-1])
    for what, job, outcome, reference, low in zip(names, jobs, _outcomes(jobs), expected, in_fp32, strict=True):
        print(what)
        if job.cfg.model.precision == "fp32":
            common.check_equal(outcome, reference, what, low)
            _check_service(outcome, what)
        else:
            common.check_near(outcome, reference, what)


@pytest.mark.full
@pytest.mark.parametrize(("world", "first"), _every_part())
def test_recipes_train_near_the_reference_in_bf16(world: str, first: int, folder: Path) -> None:
    plans = recipes.worlds()[world][first : first + JOBS]
    materials = [_material(folder / f"{world}-{first + number}-bf16", job) for number, job in enumerate(plans)]
    cfgs = [plan.on_a_cpu(job.cfg, str(m.model), dict(job.layout), "bf16") for job, m in zip(plans, materials, strict=True)]
    outcomes = _outcomes([Job(cfg, m.steps) for cfg, m in zip(cfgs, materials, strict=True)])
    for job, material, outcome in zip(plans, materials, outcomes, strict=True):
        exact = plan.on_a_cpu(job.cfg, str(material.model), dict(job.layout), "fp32")
        common.check_near(outcome, common.expectation(exact, material), f"{world}: {', '.join(job.names)}")


def _outcomes(jobs: list[Job]) -> list[Outcome]:
    ranks = run_world(jobs[0].cfg.parallel.world_size, run_jobs, jobs)
    return [merged(of_ranks) for of_ranks in zip(*ranks, strict=True)]


def _is_first_of_its_kind(job: recipes.JobPlan) -> bool:
    """Return whether it delivers weights as no earlier job of any world does, the first parts of all worlds being earlier.

    Jobs of one kind differ in objective and layout, which have tests of their own.
    """

    def kind(job: recipes.JobPlan) -> tuple[object, ...]:
        return job.family, job.cfg.rollout.colocate, job.cfg.sync.transport.type

    worlds = recipes.worlds().values()
    every = itertools.chain(*(jobs[:JOBS] for jobs in worlds), *(jobs[JOBS:] for jobs in worlds))
    return next(other for other in every if kind(other) == kind(job)) is job


def _check_service(outcome: Outcome, what: str) -> None:
    """Assert that the engine received exactly the trained weights, and that a checkpoint resumes to the same bits."""
    assert outcome.resumed is not False, f"{what}: the actor from the checkpoint trained to other weights"
    if outcome.delivered is not None:
        assert outcome.delivered.keys() == outcome.weights.keys(), what
        assert all(torch.equal(outcome.delivered[n], w) for n, w in outcome.weights.items()), what


@pytest.mark.slow
def test_every_file_is_trained_or_is_below_one_that_is() -> None:
    print(recipes.mapping())
    files = set(recipes.yaml_files())
    fragments = {path for path in files if recipes.is_fragment(path)}
    trained = {
        recipes.EXAMPLES / name.partition(": ")[0] for jobs in recipes.worlds().values() for j in jobs for name in j.names
    }
    assert trained | fragments == files and not trained & fragments
    below = set().union(*(recipes.bases_of(path) for path in trained))
    assert {path.resolve() for path in fragments} <= below


def test_every_axis_and_every_pair_of_axes_is_in_a_world() -> None:
    for recipe in recipes.shipped():
        above = {axis for axis in plan.AXES if getattr(recipe.cfg.parallel, axis) > 1}
        found = plan.worlds(recipe.cfg)
        for pair in itertools.combinations(sorted(above), min(2, len(above))):
            assert any(all(layout[axis] > 1 for axis in pair) for layout in found), (recipe.name, pair)
        for name in ("sequence_parallel", "vpp", "ep"):
            asked = getattr(recipe.cfg.parallel, name)
            assert (asked in (False, 1)) == all(layout[name] in (False, 1) for layout in found), (recipe.name, name)
