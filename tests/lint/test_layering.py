"""Packages import downwards only, modules not in circles, and each foreign package has the owner that the design gives it."""

import ast
from pathlib import Path

from tools.architecture import PICTURE, packages_of, picture, rows
from tools.structure import PACKAGE, imports, modules, own_imports, package_of

# from the bottom up
ORDER = (
    "base", "config", "monitor", "dist", "ops", "losses", "models", "wire", "rewards", "data", "engines", "rollout", "actor",
    "sync", "checkpoint", "evaluation", "report", "service", "trainer", "doctor", "command", "__main__",
)  # fmt: skip
APART = {("actor", "rollout"), ("rollout", "actor")}
# foreign package -> the only ones that may import it
OWNERS = {
    "vllm": {"wire"}, "sglang": {"wire"}, "triton": {"ops"}, "nemo_run": set(), "math_verify": {"rewards"},
    "wandb": {"monitor"}, "matplotlib": {"report"}, "jinja2": {"report"},
    "aiohttp": {"base", "rollout", "report", "wire"}, "pyarrow": {"data"}, "datasets": {"data"},
}  # fmt: skip
# packages that other programs load, or that know nothing of a run -> what they may import of ours
ALONE = {
    "rewards.grading": {"rewards.grading", "base"},
    "report.audit.reference": {"report.audit.reference"},  # this and the next are there to check `losses`
    "report.audit.advantages": {"report.audit.advantages"},
    "wire": {"wire", "dist", "base"},
}
MODULES = sorted(set(modules()) - {""})


def foreign(name: str) -> set[str]:
    return {imported.partition(".")[0] for imported in imports(modules()[name])}


def test_every_package_has_its_place() -> None:
    assert {package_of(name) for name in MODULES} == set(ORDER)
    assert len([name for name in ORDER if (PACKAGE / f"{name}.py").exists() and name != "__main__"]) <= 0


def test_packages_import_downwards() -> None:
    pairs = [(name, other) for name in MODULES for other in own_imports(name) if package_of(name) != package_of(other)]
    assert len(pairs) > 500
    upwards = [pair for pair in pairs if ORDER.index(package_of(pair[1])) >= ORDER.index(package_of(pair[0]))]
    assert upwards == []
    assert [pair for pair in pairs if (package_of(pair[0]), package_of(pair[1])) in APART] == []


def test_the_picture_is_drawn_from_the_code() -> None:
    assert PICTURE.read_text() == picture(), "run python -m tools.architecture"
    assert sorted(name for row in rows() for name in row) == sorted({package_of(name) for name in MODULES} - {"__main__"})


def test_each_kind_of_process_imports_its_own_packages() -> None:
    """A rank reads no JSON of servers and no data files, the service has no model, a server nothing but its receiver."""
    everywhere = {"base", "config", "monitor", "dist", "ops", "losses", "models", "wire", "checkpoint", "engines", "service"}
    assert packages_of("ranks") == everywhere | {"actor", "sync", "trainer"}
    assert packages_of("rollout service") == everywhere | {"rollout", "rewards", "data", "evaluation"}
    assert packages_of("inference servers") == {"wire", "dist", "base"}
    assert packages_of("grading workers") == {"rewards", "base"}
    assert packages_of("launcher") == {"command", "trainer", "service", "monitor", "config", "base"}


def test_no_module_imports_itself_over_others() -> None:
    below: dict[str, set[str]] = {name: own_imports(name, type_checking=False) for name in MODULES}
    while ready := {name for name, others in below.items() if not others & below.keys()}:
        below = {name: others for name, others in below.items() if name not in ready}
    assert sorted(below) == [], "each of these imports another of them"


def test_foreign_packages_have_one_owner() -> None:
    users = {package: {package_of(name) for name in MODULES if package in foreign(name)} for package in OWNERS}
    assert users == OWNERS


def test_temporary_folders_are_private_folders() -> None:
    """Others stay when their owner is killed."""

    def named(path: Path) -> set[str]:
        return {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)} & {
            "mkdtemp", "mkstemp", "TemporaryDirectory", "NamedTemporaryFile", "SpooledTemporaryFile",
        }  # fmt: skip

    assert {name: found for name in MODULES if (found := named(modules()[name]))} == {"base.scratch": {"mkdtemp"}}
    assert not any(n.startswith("tempfile.") for name in MODULES for n in imports(modules()[name])), "import the module itself"


def test_what_runs_in_other_processes_imports_little() -> None:
    for package, allowed in ALONE.items():
        for name in (name for name in MODULES if (name + ".").startswith(package + ".")):
            assert not {"megatron", "transformer_engine", "pydantic"} & foreign(name), name
            assert [o for o in own_imports(name) if not any((o + ".").startswith(a + ".") for a in allowed)] == [], name


def test_configs_are_read_without_the_code_that_they_configure() -> None:
    """The launcher's environment has no torch, which the data objects import."""
    for name in (name for name in MODULES if package_of(name) == "config"):
        others = own_imports(name, type_checking=False)
        assert {package_of(other) for other in others} <= {"config", "base"}, name
        assert not any("torch" in foreign(each) for each in {name, *others}), name


def test_losses_know_neither_megatron_nor_collectives() -> None:
    for path in (PACKAGE / "losses").glob("*.py"):
        assert not any(n.startswith(("megatron", "torch.distributed", "tepo_megatron.dist")) for n in imports(path)), path


def test_platform_alone_names_backends() -> None:
    def strings(path: Path) -> set[object]:
        return {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}

    assert [n for n in MODULES if not n.startswith("dist.platform") and strings(modules()[n]) & {"gloo", "nccl"}] == []
