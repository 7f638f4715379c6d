"""The figures that `python -m tools.structure` prints stay within their bounds."""

import subprocess
import sys
from pathlib import Path

from tools.structure import ROLLOUT, WEIGHT, arrows, hops, modules, package_of, takes_config, too_large


def test_the_top_of_the_package_is_small() -> None:
    assert len({package_of(name) for name in modules()} - {"", "__main__"}) <= 21
    assert len(arrows()) <= 116


def test_functions_take_what_they_use() -> None:
    assert len(takes_config()) <= 32, takes_config()


def test_the_package_fits_its_budget() -> None:
    """Lines of files. A cut lowers the bound; a feature that raises it says in its commit what it replaces."""
    assert sum(len(path.read_text().splitlines()) for path in modules().values()) <= 50_323


def test_functions_files_and_classes_are_small() -> None:
    assert too_large() == []


def test_the_linter_reads_every_file_of_the_package() -> None:
    """Its default leaves out every folder that is called dist."""
    shown = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files", "."], capture_output=True, text=True, check=True
    )
    assert {str(path.resolve()) for path in modules().values()} <= set(shown.stdout.splitlines())


def test_lines_of_templates_are_as_short_as_those_of_code() -> None:
    """Check lines of pages, style sheets and scripts; ruff checks those of Python."""
    files = [path for path in Path("tepo_megatron/report/templates").iterdir() if path.is_file()]
    lines = [(path.name, n, line) for path in files for n, line in enumerate(path.read_text().splitlines(), start=1)]
    assert len(files) > 8 and [(name, n) for name, n, line in lines if len(line) > 128] == []


def test_the_long_paths_are_short() -> None:
    assert len({file for file, _ in hops(ROLLOUT)}) <= 18
    assert len({file for file, _ in hops(WEIGHT)}) <= 8
