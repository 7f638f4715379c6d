"""The figures that `python -m tools.structure` prints stay within their bounds; see also `tests/parallel/test_flows.py`."""

from __future__ import annotations

from pathlib import Path

from tools.structure import ROLLOUT, WEIGHT, arrows, hops, lines_of_code, modules, package_of, takes_config, too_large


def test_the_top_of_the_package_is_small() -> None:
    assert len({package_of(name) for name in modules()} - {"", "__main__"}) <= 32
    assert (
        len(arrows()) <= 207
    )  # the second training loop, `sft`, uses 14 of the packages below it; traces: servers record spans


def test_functions_take_what_they_use() -> None:
    assert len(takes_config()) <= 32, takes_config()


def test_the_package_does_not_grow() -> None:
    """The package has at most the lines of code that it had before the tree was moved, and those of the rollout service.

    23,392 before; the service takes 460, binary answers 290, the grading queue 180, kept connections and linear work 200,
    errors on every rank, large JSON answers and evaluations that grade while they sample 60,
    replayed experts for the machines that pack them 110, GMPO, SAPO, DPPO, GDPO and the readings of the paper 140,
    warnings of rank 0 in the log 30, intervals over the seeds of an ablation 20,
    checkpoints on demand 140,
    the record of each token's loss, its audit in fp64 and its page 1,070,
    log files of ranks 20, the log of decisions and the repetition of runs 230,
    truncated sampling with the same truncation in training 470,
    minibatches that are trained while others are sampled 240,
    element deltas and slices of the weights, and the bytes of a delivery in the plan 690,
    ranks that are restarted next to a living service 550,
    canaries, which say which weights serve 540,
    restarts on request with another layout, and with fewer ranks after a device was lost 250,
    slices from the shards of the trainer's ranks 60,
    supervised fine-tuning 500, distillation 30,
    the gated delta rule: operators, layer, checkpoints, and the Qwen3.5 family 712,
    hybrids in vLLM's CPU server and in the plan 339,
    ranks of several machines that are restarted 40, the exact KL to a teacher 212,
    rewards of programs and their sandbox 520,
    agents through a gateway, environments, and samples that are lost 700,
    plans from a recorded run, what they leave out, and the held-out loss that ends fine-tuning 167,
    judges: their term, fleets, quoting and comparison with labels 790,
    traces of steps on one clock 806,
    metrics for Prometheus, and alerts 586, the live page and the load of each server 776,
    engines of older releases 90, functions that block their thread 170,
    the page of fine-tuning, and the live page of `tepo train` 120, judges and teachers in plans 90,
    lost samples in reports 30, tool calls of four families 100,
    limits that look once more, lost samples of evaluations, proxies, long temporary folders, quotas of CPUs 140,
    starts without progress, and requests for weights that nobody sends 70, our own sampler 450.
    """
    assert sum(map(lines_of_code, modules().values())) <= 23_392 + 8_133 + 700 + 167 + 790 + 806 + 586 + 776 + 600 + 210 + 450


def test_functions_files_and_classes_are_small() -> None:
    assert too_large() == []


def test_lines_of_templates_are_as_short_as_those_of_code() -> None:
    """Check lines of pages, style sheets and scripts; ruff checks those of Python."""
    files = [path for path in Path("tepo_megatron/report/templates").iterdir() if path.is_file()]
    lines = [(path.name, n, line) for path in files for n, line in enumerate(path.read_text().splitlines(), start=1)]
    assert len(files) > 8 and [(name, n) for name, n, line in lines if len(line) > 128] == []


def test_the_long_paths_are_short() -> None:
    assert len({file for file, _ in hops(ROLLOUT)}) <= 18
    assert len({file for file, _ in hops(WEIGHT)}) <= 8
