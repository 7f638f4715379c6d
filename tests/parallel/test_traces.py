"""The trace of a step of real ranks: every process has its row, and the passes of a pipeline come in their order."""

from __future__ import annotations

from pathlib import Path

from tepo_megatron.launcher.trace_request import coverage, read_trace
from tepo_megatron.observability.trace_file import trace_path
from tests.parallel import resume_worlds as w


def test_x(tmp_path: Path) -> None:
    model = w.write_inputs(tmp_path / "model")
    cfg = w.run_config(model, tmp_path, parallel={"pp": 2}, logging={"trace_every": 2}, training={"steps": 2})
    w.attempt(cfg, tmp_path / "journal")
    print((cfg.run_dir / "log.txt").read_text())
    from tepo_megatron.launcher.trace_request import describe
    print("\n".join(describe(read_trace(trace_path(cfg.run_dir, 2)))))
    import shutil; shutil.copy(trace_path(cfg.run_dir, 2), "/tmp/trace-pp2.json.gz")
    assert 0
