"""Every YAML file under examples/, as the training configs that it means, and the worlds that train them.

`python -m tests.gate.recipes` prints which file is trained by which job of which world.
"""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from tepo_megatron.config import Config
from tepo_megatron.config.io import load_config, plain, read_layers
from tepo_megatron.doctor.plan.command import read_model
from tepo_megatron.report.ablation.plan import read_plan
from tests.gate import plan

EXAMPLES = Path(__file__).parents[2] / "examples"
# family, and whether the embedding is tied, of models that are in recipes but in no table of sizes
OWN_MODELS = {
    "models/my-qwen3": ("qwen3", True),
    ".cache/demo/seed-0": ("qwen3", True),
    ".cache/long/seed-0": ("qwen3", True),
    ".cache/smollm/SmolLM2-135M-Instruct": ("llama", True),
    "runs/demo-code-model/hf": ("qwen3", True),
}
NOWHERE = Path("/no-such-folder")  # a model in it is known by its name alone, whatever is on this machine
# sections that do not affect the code of an update
_NOT_TRAINING = ("name", "data", "output", "reward", "evaluation", "logging", "overwrite", "resume", "export_hf", "seed")
_NOT_TRAINING_ROLLOUT = ("server", "servers", "min_servers", "engine", "max_generation_rounds", "filter_uniform_groups")


@dataclass(frozen=True)
class Shipped:
    """A training config of the repository. `name` is its file, and the run where the file is an ablation."""

    name: str
    cfg: Config

    @property
    def family(self) -> tuple[str, bool]:
        """The model's family in `data.FAMILIES`, and whether its embedding is tied."""
        if self.cfg.model.path in OWN_MODELS:
            return OWN_MODELS[self.cfg.model.path]
        family, arch = read_model(NOWHERE / Path(self.cfg.model.path).name)
        return family.name, arch.tied_embeddings


@dataclass
class JobPlan:
    """One distinct training config of a world, and the names of the configs that it represents."""

    family: tuple[str, bool]
    cfg: Config  # as shipped, under the first name
    layout: dict[str, object]
    names: list[str] = field(default_factory=list)


def yaml_files() -> list[Path]:
    return sorted(EXAMPLES.rglob("*.yaml"))


@cache
def shipped() -> tuple[Shipped, ...]:
    """Return every training config. A file without a name is a fragment, which is covered by the files that use it."""
    found = []
    for path in yaml_files():
        name = str(path.relative_to(EXAMPLES))
        if "runs" in yaml.safe_load(path.read_text()):
            runs = read_plan(path, [], lambda cfg: None).runs
            found += [Shipped(f"{name}: {run}", next(iter(seeds.values()))) for run, seeds in runs.items()]
        elif not is_fragment(path):
            found.append(Shipped(name, load_config(path)))
    return tuple(found)


def is_fragment(path: Path) -> bool:
    """Return whether a file is made to be the `base` of others: neither it nor a base of its own names a run."""
    return "name" not in read_layers(path).tree


def bases_of(path: Path) -> set[Path]:
    base = yaml.safe_load(path.read_text()).get("base")
    if base is None:
        return set()
    below = (path.parent / base).resolve()
    return {below} | bases_of(below)


def switches(job: JobPlan) -> str:
    """Return the key that distinguishes jobs: the resolved config on a CPU, without the keys that do not affect an update."""
    tree = plain(plan.on_a_cpu(job.cfg, "model", dict(job.layout), "fp32"))
    for key in _NOT_TRAINING:
        tree.pop(key)
    for key in _NOT_TRAINING_ROLLOUT:
        tree["rollout"].pop(key)
    return json.dumps([job.family, plan.updates(job.cfg)[2], tree], sort_keys=True)


@cache
def worlds() -> dict[str, list[JobPlan]]:
    found: dict[str, dict[str, JobPlan]] = defaultdict(dict)
    for recipe in shipped():
        for layout in plan.worlds(recipe.cfg):
            job = JobPlan(recipe.family, recipe.cfg, layout)
            found[plan.name_of(layout)].setdefault(switches(job), job).names.append(recipe.name)
    return {name: list(jobs.values()) for name, jobs in found.items()}


def mapping() -> str:
    """Return a line for each file: the worlds, and in each the job, that train it."""
    places: dict[str, list[str]] = defaultdict(list)
    for world, jobs in worlds().items():
        for number, job in enumerate(jobs):
            for name in job.names:
                places[name].append(f"{world}, job {number}")
    lines = [f"{name}: {'; '.join(where)}" for name, where in sorted(places.items())]
    for path in filter(is_fragment, yaml_files()):
        users = [str(p.relative_to(EXAMPLES)) for p in yaml_files() if path.resolve() in bases_of(p) and not is_fragment(p)]
        lines.append(f"{path.relative_to(EXAMPLES)}: by its users, {len(users)} files, {users[0]} for one")
    return "\n".join(lines)


if __name__ == "__main__":
    print(mapping())
