"""The page of the compatibility matrix is that of its results, and the results cover every release."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from tests.matrix import checks, environments, page
from tests.matrix.checks import FAILED, NOT_RUN, PASSED, Check, Result
from tests.matrix.releases import RELEASES, checks_of


def test_the_page_is_that_of_the_results() -> None:
    assert page.PAGE.read_text() == page.text(page.load(), page.pinned_names()), "run `make matrix ARGS=--page`"


def test_every_release_has_a_result_or_the_reason_why_it_has_none() -> None:
    rows = page.load()
    assert list(rows) == [release.name for release in RELEASES]
    for release in RELEASES:
        row = rows[release.name]
        titles = [] if row.not_installed else [each.title for each in checks_of(release.component)]
        assert list(row.checks) == titles, row.name
        assert all(found.detail for found in row.checks.values() if found.result != PASSED), row.name


def test_every_pinned_release_passes() -> None:
    rows, pinned = page.load(), page.pinned_names()
    assert len(pinned) == 4
    assert [name for name in pinned if {found.result for found in rows[name].checks.values()} != {PASSED}] == []


def test_a_page_names_the_reason_of_each_failure(tmp_path: Path) -> None:
    vllm = [release for release in RELEASES if release.component == "vllm"]
    titles = [each.title for each in checks_of("vllm")]
    found = dict.fromkeys(titles, Result(PASSED, "1e-06 nats")) | {"sleep": Result(FAILED, "KeyError: 'status'")}
    versions = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.19.0"}
    rows = {
        vllm[0].name: page.Row(vllm[0].name, {}, {}, "no such version", 0, "c"),
        vllm[1].name: page.Row(vllm[1].name, versions, found, "", 60, "c"),
    }
    page.save(rows, tmp_path / "matrix.json")
    assert page.load(tmp_path / "matrix.json") == rows
    text = page.text(rows, [vllm[1].name])
    assert f"| **{vllm[1].version}** | 3.11.7 | 2.13.0 | 5.19.0 | ✓ 1e-06 nats |" in text
    assert f"* {vllm[1].version} (sleep): `KeyError: 'status'`" in text
    assert f"* {vllm[0].version}: `not installed: no such version`" in text
    assert f"* {vllm[2].version}; {vllm[3].version}; " in text and "`not installed: It was not tried.`" in text


REPORT = """<testsuites><testsuite>
<testcase classname="tests.server.test_x" name="test_a[vllm-1]"><system-out>
largest log-prob difference at T=0.7: 1.5e-06
largest log-prob difference at T=1.0: 2.6e-06</system-out></testcase>
<testcase classname="tests.server.test_x" name="test_a[vllm-2]"/>
<testcase classname="tests.server.test_x" name="test_b"><failure message="assert 1 == 2"/></testcase>
<testcase classname="tests.server.test_x" name="test_c"><error message="errors.RolloutError: gone">x</error></testcase>
<testcase classname="tests.server.test_x" name="test_d"><skipped message="no"/></testcase>
</testsuite></testsuites>"""


def test_results_are_read_from_the_report_of_pytest() -> None:
    columns = [Check(name, (f"tests/server/test_x.py::test_{name}",)) for name in "abcd"]
    columns += [Check("two", tuple(f"tests/server/test_x.py::test_{name}" for name in "ab"))]
    columns += [
        Check("other", ("tests/server/test_x.py::test_a[{engine}-2]",)),
        Check("missing", ("tests/server/test_x.py::t",)),
    ]
    found = checks.results(columns, "vllm", ElementTree.fromstring(REPORT), "too slow")
    assert found == {
        "a": Result(PASSED, "3e-06 nats"),
        "b": Result(FAILED, "assert 1 == 2"),
        "c": Result(FAILED, "errors.RolloutError: gone"),
        "d": Result(NOT_RUN, "too slow"),
        "two": Result(FAILED, "assert 1 == 2"),
        "other": Result(PASSED, ""),
        "missing": Result(NOT_RUN, "too slow"),
    }


def test_a_release_s_exact_pins_replace_ours_but_not_the_cpu_builds() -> None:
    ours = ["# sglang==0.5.23", "torch==2.13.0", "openai==2.8.0", "numba", "outlines==0.1.11"]
    declared = ["torch==2.14.1", "openai==2.6.1", "numba==0.65.1", "cuda-tile==1.6.0", "OutLines==0.1.12; extra == 'x'"]
    assert environments.adapted(ours, declared) == ["torch==2.13.0", "openai==2.6.1", "numba==0.65.1", "outlines==0.1.11"]


def test_reasons_are_one_line_without_folders() -> None:
    output = "WARNING: x\n  - No solution found\n  ╰─▶ no version of a==1\n"
    assert environments.reason(output) == "No solution found no version of a==1"
    failure = "Traceback\n  File /root/a/b/c.py\nImportError: cannot import /root/a/b/c.py\nhint"
    assert checks.short(failure) == "ImportError: cannot import c.py"
