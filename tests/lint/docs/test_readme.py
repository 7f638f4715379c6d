"""README.md and docs/ agree with the code in everything that can be counted or looked up."""

import re
from pathlib import Path

import pytest

from benchmarks.results import OURS, load
from tepo_megatron.losses import OBJECTIVES
from tools import config_reference

README, OBJECTIVES_PAGE = Path("README.md").read_text(), Path("docs/objectives.md").read_text()
COSTS = Path("docs/performance.md").read_text()
PAGES = {
    page: Path(page).read_text()
    for page in ("README.md", "docs/comparison.md", "docs/objectives.md", "docs/tour.md", "examples/paper/README.md")
}


def test_the_number_of_settings() -> None:
    row = next(line for line in PAGES["docs/comparison.md"].splitlines() if line.startswith("| Settings"))
    assert re.search(r"\d+", row.split("|")[2]).group() == str(config_reference.count(config_reference.page()))


def test_every_method_is_named() -> None:
    assert f"names {len(OBJECTIVES)} methods" in OBJECTIVES_PAGE and f"{len(OBJECTIVES) - 1} other objectives" in README
    assert all(f"`{name}`" in OBJECTIVES_PAGE for name in OBJECTIVES)


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    """Links, and words in backticks with a folder and an ending, are files of this repository."""
    roots = (Path(), Path("tepo_megatron"), Path(page).parent)
    named = set(re.findall(r"`([\w.-]+/[\w./-]*\.(?:py|md|yaml|csv))`", PAGES[page]))
    linked = {target.partition("#")[0] for target in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGES[page])}
    elsewhere = ("recipe/", "verl/")  # in other projects
    names = [name for name in sorted(named | linked) if not name.startswith(elsewhere)]
    assert len(names) > 5 or page in ("docs/comparison.md", "docs/objectives.md")
    assert [name for name in names if not any((root / name).exists() for root in roots)] == []


def test_figures_are_those_of_the_results() -> None:
    found = {x["id"]: {OURS: x["ours"], **x["peers"]} for x in load(Path("benchmarks/results/cpu.json"))}

    def times(row: str, of: str, over: str = OURS) -> float:
        return found[row][of] / found[row][over]

    memory = [f"{found[f'1/extra memory, 8192 x 18992 bf16, {threads}'][OURS]:.3f} U" for threads in ("1 thread", "2 threads")]
    others = [found["1/extra memory, 8192 x 18992 bf16, 1 thread"][peer] for peer in ("trl", "verl", "plain")]
    assert f"1 and 2 threads | {' and '.join(memory)} | {' | '.join(f'{x:.3g} U' for x in others)} |" in COSTS
    moved = [found["1/bytes moved, 8192 x 18992 bf16"][who] for who in (OURS, "trl", "verl", "plain")]
    assert f"| bytes moved by the same | {' | '.join(f'{x:.3g} U' for x in moved)} |" in COSTS
    wrong = [found["3/entropy of logits shifted by 100, 64 x 32000 fp32"][who] for who in (OURS, "trl", "verl", "plain")]
    assert f"shifted by 100, nats | {' | '.join(f'{x:.1e}' for x in wrong)} |" in COSTS
    counts = [[found[f"4/log-prob + entropy, TP2, {way}"][who] for way in ("forward", "backward")] for who in (OURS, "verl")]
    assert "| TP collectives, forward / backward | {:g} / {:g} | | {:g} / {:g} | |".format(*counts[0], *counts[1]) in COSTS
    of = "6/efficiency of training, {}, DP16 PP2"
    plans = [
        [found[of.format(what)][who] for what in ("mean of the seeds", "worst seed")]
        for who in (OURS, "slime", "longest first")
    ]
    ours, slime, longest = (f"{mean:.3f}, {worst:.3f}" for mean, worst in plans)
    assert f"of 16 seeds | {ours} | slime's algorithm {slime}; longest first {longest} |" in COSTS
    for shape in ("256 x 18992", "1024 x 32000"):
        one, two = (f"2/time, {shape} bf16, {threads}" for threads in ("1 thread", "2 threads"))
        cells = [f"{times(one, peer):.1f}x and {times(two, peer):.1f}x" for peer in ("trl", "verl", "plain")]
        assert f"| time over ours, {shape} bf16, 1 and 2 threads | 1 | {' | '.join(cells)} |" in COSTS
    step = [
        f"{times(f'7/demo, {layout}', OURS, 'plain'):.2f}" for layout in ("TP1, 1 thread", "TP1, 2 threads", "TP2, 2 threads")
    ]
    assert f"TP1 on 1 and 2 threads; TP2 | {step[0]}, {step[1]}; {step[2]} |" in COSTS
    shm, gloo, sglang = (
        f"{times(f'12/{which}: gather and transport', OURS, 'copy'):.1f}"
        for which in ("shm, vllm", "group, vllm", "group, sglang")
    )
    assert f"shared memory; gloo | {shm}; {gloo} (vLLM), {sglang} (SGLang) |" in COSTS
    loaded = [f"{times(f'12/shm, {engine}: all, with the engine loading', OURS, 'copy'):.1f}" for engine in ("vllm", "sglang")]
    assert f"until the engine has loaded them | {loaded[0]} (vLLM), {loaded[1]} (SGLang) |" in COSTS
    waits = [
        times(f"11/training waits, {model} model, median after the first", OURS, "plain copy") for model in ("demo", "100m")
    ]
    assert f"0.6 M, 93 M parameters | {waits[0]:.2f}, {waits[1]:.2f} | target: 1, missed |" in COSTS
    ahead = "13/one step ahead, a core for each"
    bound, turns = times(ahead, OURS, "longer phase + sync"), times(ahead, "in turn")
    assert f"with the sync | {bound:.2f} | in turns: {turns:.2f} |" in COSTS
    rows = [line for line in README.splitlines() if line.startswith(("| memory beyond the logits", "| time over ours"))]
    assert len(rows) == 2 and all(row in COSTS for row in rows)


def test_the_readme_is_short() -> None:
    """Two screens. A line of code may be longer than one of prose."""
    lines, in_code = README.splitlines(), False
    assert len(lines) <= 120
    for line in lines:
        in_code ^= line.startswith("```")
        assert in_code or len(line) <= 160, line
