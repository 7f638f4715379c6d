"""The Triton kernels on a CPU: the tests of the token statistics again, in a process whose triton interprets."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.token_statistics import HAS_TRITON, INTERPRETED

ROOT = Path(__file__).parents[3]
TESTS = [
    "tests/unit/ops/test_vocab_parallel.py",
    "tests/unit/ops/test_vocab_parallel_in_place.py",
    "tests/parallel/test_statistics.py",
]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreting one")
def test_triton_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", *TESTS, "-k", "triton", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 40 and "skipped" not in done.stdout, done.stdout[-2000:]


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="kernels that are interpreted are not compiled")
@pytest.mark.parametrize(("logits", "arithmetic"), [("bf16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")])
def test_triton_kernels_compile_for_an_h100(logits: str, arithmetic: str) -> None:
    """To machine code, which needs no GPU."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tepo_megatron.ops.token_statistics import triton_kernels

    x, a = "*" + logits, "*" + arithmetic
    sums = {"top_ptr": a, "total_ptr": a, "moment_ptr": a}
    row = {"column_ptr": "*i64", "top_ptr": a, "constant_ptr": a, "slope_ptr": a, "label_ptr": a}
    out = {"out_ptr": x, "out_stride": "i64"}
    for kernel, signature, constants in (
        (triton_kernels._statistics, {"x_ptr": x, "stride": "i64", "columns": "i32"} | sums, {}),
        (triton_kernels._gradient, {"x_ptr": x, "x_stride": "i64"} | out | {"columns": "i32"} | row, {"with_slope": True}),
    ):
        constants = {"temperature": 0.7, "block": triton_kernels.BLOCK} | constants
        source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
        compiled = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": triton_kernels.WARPS})
        assert len(compiled.asm["cubin"]) > 1000
