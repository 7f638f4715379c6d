"""The museum of silent bugs fits the tree. `make mutants` shows that each is noticed."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.copies import ROOT, selection
from tests.mutants.exhibit import Exhibit, NotFound, mutated
from tests.mutants.exhibits import all_exhibits

TREE = """
def same():
    return 1


class Box:
    def value(self):
        if self:
            first = 1
            second = 2
        return first + second
"""
EXHIBIT = Exhibit("name", "source", "bug", "cost", "Box.value", "first + second", "first - second", ("tests",))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tepo_megatron" / "deep").mkdir(parents=True)
    (tmp_path / "tepo_megatron" / "deep" / "box.py").write_text(TREE)
    return tmp_path


def test_every_exhibit_fits_this_tree() -> None:
    exhibits = all_exhibits()
    assert len({exhibit.name for exhibit in exhibits}) == len(exhibits)
    for exhibit in exhibits:
        file, text = mutated(exhibit, ROOT)
        assert text != (ROOT / file).read_text(), exhibit.name


def test_every_exhibit_names_tests_of_the_core_that_exist() -> None:
    for exhibit in all_exhibits():
        assert exhibit.tests and all((ROOT / test.partition("::")[0]).exists() for test in exhibit.tests), exhibit.name
        for words in exhibit.tests:
            path, _, name = words.partition("::")
            function = re.sub(r"\[.*", "", name)
            text = (ROOT / path).read_text() if path.endswith(".py") else ""
            assert not name or f"def {function}(" in text, f"{exhibit.name}: {words}"


@pytest.mark.full
def test_every_exhibits_tests_are_selected() -> None:
    exhibits = all_exhibits()
    assert [exhibit.name for exhibit in exhibits if len({"::" in test for test in exhibit.tests}) > 1] == []
    tests = sorted({test for exhibit in exhibits for test in exhibit.tests})
    names = [test for test in tests if "::" in test]
    for arguments in (selection(names), *(selection([test]) for test in tests if test not in names)):
        words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
        found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert found.returncode == 0, found.stdout[-2000:]


def test_a_bug_is_put_where_its_symbol_is(tree: Path) -> None:
    file, text = mutated(EXHIBIT, tree)
    assert file == Path("tepo_megatron/deep/box.py") and text == TREE.replace("first + second", "first - second")
    several = dataclasses.replace(EXHIBIT, old="first = 1\n            second", new="first = 2\n            second")
    assert mutated(several, tree)[1] == TREE.replace("first = 1", "first = 2")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"symbol": "Box.other"}, "one Box.other is to have this text exactly once, and 0 have, of those in no file"),
        ({"old": "third"}, "and 0 have, of those in tepo_megatron/deep/box.py:\nthird"),
        ({"old": "first"}, "and 0 have, of those in tepo_megatron/deep/box.py:\nfirst"),
        ({"symbol": "same"}, "one same is to have this text"),
    ],
)
def test_an_exhibit_that_does_not_fit_is_an_error(changes: dict[str, str], complaint: str, tree: Path) -> None:
    with pytest.raises(NotFound, match=complaint):
        mutated(dataclasses.replace(EXHIBIT, **changes), tree)


def test_a_symbol_that_occurs_twice_is_distinguished_by_its_text(tree: Path) -> None:
    other = tree / "tepo_megatron" / "box.py"
    other.write_text(TREE)
    with pytest.raises(NotFound, match=r"and 2 have, of those in tepo_megatron/box\.py, tepo_megatron/deep/box\.py"):
        mutated(EXHIBIT, tree)
    other.write_text(TREE.replace("second", "third"))
    assert mutated(EXHIBIT, tree)[0] == Path("tepo_megatron/deep/box.py")
