"""Compile the Triton kernels ahead of time, without a GPU, and read registers, spills and access widths from the machine code.

    python -m benchmarks.triton_aot [--out benchmarks/results/triton.json]

Compiles for sm_90 (H100, H200) and sm_100 (B200) with the installed Triton and the ptxas that it includes. The rows of that
version of Triton are replaced in the file; rows of other versions stay. To add another version, put it first on the path:

    pip install --no-deps --target /tmp/triton-3.7.1 triton==3.7.1
    PYTHONPATH=/tmp/triton-3.7.1 python -m benchmarks.triton_aot

The counts are those of the machine code (`nvdisasm`), not of PTX. They say nothing about time: that takes a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.results import ROOT
from tepo_megatron.ops.token_statistics import triton_kernels

OUT = ROOT / "benchmarks/results/triton.json"
ARCHITECTURES = (90, 100)
VARIANTS = ("statistics", "gradient", "gradient with entropy")
ITEM_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
# Columns of a rank: padded width, real columns. 32001 is a Llama vocabulary with one added token.
SHAPES = {"real columns % 16 == 0": (32016, 32016), "real columns odd": (32016, 32001), "padded width odd": (32001, 32001)}
RECORDED_SHAPES = tuple(SHAPES)[:2]

# Per multiprocessor of sm_90 and sm_100: 32-bit registers, threads, bytes of shared memory. A block's registers are allocated
# in units of 8 per thread, and the driver adds 1 KiB of shared memory to each block.
_REGISTERS, _WARPS, _SHARED_BYTES, _RESERVED_BYTES = 65536, 64, 228 * 1024, 1024

_BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
_ACCESS = re.compile(r"\b(LDG|STG|LDL|STL)(\.[\w.]+)?(?=\s)")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel, compiled for one type of logits, one alignment of the columns and one architecture.

    Attributes:
        arch: Compute capability times 10.
        spills: Accesses of local memory in the machine code.
        stack: Bytes of local memory per thread.
        warps: Warps that fit on a multiprocessor at a time, of 64.
        loads: Number of loads from global memory in the machine code, by width in bytes.
        stores: Number of stores to global memory in the machine code, by width in bytes.
    """

    triton: str
    ptxas: str
    arch: int
    kernel: str
    logits: str
    shape: str
    registers: int
    spills: int
    stack: int
    shared: int
    warps: int
    loads: dict[str, int]
    stores: dict[str, int]

    def vectors_of_a_block(self) -> int:
        """Return the number of 16-byte accesses with which each thread moves its part of a block of columns."""
        return triton_kernels.BLOCK * ITEM_BYTES[self.logits] // (16 * 32 * triton_kernels.OPTIONS["num_warps"])


def compile_kernel(kernel: str, logits: str, shape: str, arch: int) -> CompiledKernel:
    """Compile one kernel and return its properties."""
    arithmetic = "*fp64" if logits == "fp64" else "*fp32"
    width, columns = SHAPES[shape]
    values = {"x_ptr": 0, "stride": width, "x_stride": width, "out_ptr": 0, "out_stride": width, "width": width,
              "columns": columns, "column_ptr": 0}  # fmt: skip
    constants: dict[str, Any] = {"temperature": 0.7}
    types = {"x_ptr": f"*{logits}", "out_ptr": f"*{logits}", "column_ptr": "*i64"}
    if kernel == "statistics":
        function = triton_kernels._statistics
        constants |= triton_kernels.columns_of_lanes(ITEM_BYTES[logits])
    else:
        function = triton_kernels._gradient
        constants |= {"with_slope": kernel == "gradient with entropy", "block": triton_kernels.BLOCK}
    signature, aligned = {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name, arithmetic if name.endswith("_ptr") else "i32")
        if values.get(name, 0) % 16 == 0:  # as Triton specializes a launch; PyTorch's memory is aligned to more than 16 bytes
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(triton_kernels.OPTIONS))
    return _read(compiled.asm["cubin"], compiled.metadata.shared, kernel, logits, shape, arch)


def _read(cubin: bytes, shared: int, kernel: str, logits: str, shape: str, arch: int) -> CompiledKernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        resources = _RESOURCES.search(_run("cuobjdump", "--dump-resource-usage", file.name))
        code = _run("nvdisasm", "-c", file.name)
    if resources is None:
        raise RuntimeError("cuobjdump prints no resource usage of the kernel; has its format changed?")
    registers, stack = map(int, resources.groups())
    accesses = Counter((op, _width(suffix or "")) for op, suffix in _ACCESS.findall(code))
    return CompiledKernel(
        triton.__version__, _ptxas_version(arch), arch, kernel, logits, shape, registers,
        sum(n for (op, _), n in accesses.items() if op in ("LDL", "STL")), stack, shared,
        resident_warps(registers, shared, triton_kernels.OPTIONS["num_warps"]),
        *({str(width): n for (op, width), n in sorted(accesses.items()) if op == wanted} for wanted in ("LDG", "STG")),
    )  # fmt: skip


def _width(suffix: str) -> int:
    """Return the bytes of an access, from the suffixes of its instruction; 4 without a suffix."""
    for part, width in (("256", 32), ("128", 16), ("64", 8), ("16", 2), ("8", 1)):
        if re.search(rf"\.[USBF]*{part}\b", suffix):
            return width
    return 4


def resident_warps(registers: int, shared: int, warps: int) -> int:
    """Return the number of warps that fit on a multiprocessor at a time."""
    per_thread = -(-registers // 8) * 8
    blocks = min(_REGISTERS // (per_thread * 32 * warps), _SHARED_BYTES // (shared + _RESERVED_BYTES), _WARPS // warps)
    return blocks * warps


def _ptxas_version(arch: int) -> str:
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        path = get_ptxas(arch).path
    except AttributeError:  # 3.6 returns the path and the version
        path = get_ptxas(arch)[0]
    found = re.search(r"\bV(\S+)", subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout)
    return found[1] if found else "unknown"


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_BINARIES / tool, *arguments], capture_output=True, text=True, check=True, timeout=60).stdout


def compile_all() -> list[CompiledKernel]:
    """Compile every row of the file with the installed Triton."""
    cases = itertools.product(ARCHITECTURES, VARIANTS, ("bf16", "fp32"), RECORDED_SHAPES)
    return [compile_kernel(kernel, logits, shape, arch) for arch, kernel, logits, shape in cases]


def load(path: Path = OUT) -> list[CompiledKernel]:
    """Read the file; [] if it does not exist."""
    return [CompiledKernel(**x) for x in json.loads(path.read_text())] if path.exists() else []


def save(rows: Sequence[CompiledKernel], path: Path = OUT) -> None:
    """Write JSON, and the table as Markdown next to it."""
    path.write_text("[\n" + ",\n".join(" " + json.dumps(asdict(x)) for x in rows) + "\n]\n")
    path.with_suffix(".md").write_text(table(rows))


def table(rows: Sequence[CompiledKernel]) -> str:
    """Return a Markdown table."""
    head = ("triton", "ptxas", "sm", "kernel", "logits", "columns", "registers", "spills", "shared bytes", "warps of 64",
            "loads", "stores")  # fmt: skip
    lines = [
        (x.triton, x.ptxas, x.arch, x.kernel, x.logits, x.shape, x.registers, x.spills, x.shared, x.warps,
         _widths(x.loads), _widths(x.stores))
        for x in rows
    ]  # fmt: skip
    cells = [[str(cell) for cell in line] for line in (head, *lines)]
    size = [max(len(line[i]) for line in cells) for i in range(len(head))]
    text = ["| " + " | ".join(cell.ljust(n) for cell, n in zip(line, size, strict=True)) + " |" for line in cells]
    text.insert(1, "| " + " | ".join("-" * n for n in size) + " |")
    return (
        "# Triton kernels, compiled ahead of time\n\n"
        "Compiled ahead of time by `python -m benchmarks.triton_aot`, without a GPU: not a measurement of time.\n"
        "Loads and stores are instructions of the machine code: number x bytes. Those of fewer than 16 bytes are the row's\n"
        "own numbers (maximum, coefficients, label).\n\n" + "\n".join(text) + "\n"
    )


def _widths(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} x {width}" for width, n in sorted(counts.items(), key=lambda x: -int(x[0])))


def main() -> None:
    """Compile all kernels, update the file and print the new rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.triton_aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    kept = [x for x in load(out) if x.triton != triton.__version__]
    rows = sorted(kept + compile_all(), key=lambda x: [int(n) for n in x.triton.split(".")[:3]])
    save(rows, out)
    print(table([x for x in rows if x.triton == triton.__version__]))


if __name__ == "__main__":
    main()
