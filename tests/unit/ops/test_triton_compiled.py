"""The Triton kernels compiled to machine code for H100 and B200, which needs no GPU: spills, access widths, registers."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.token_statistics import HAS_TRITON, INTERPRETED

if not HAS_TRITON or INTERPRETED:
    pytest.skip("needs triton as a compiler: installed, and not interpreting", allow_module_level=True)

import triton

from benchmarks import triton_aot
from benchmarks.triton_aot import ARCHITECTURES, OUT, RECORDED_SHAPES, VARIANTS, CompiledKernel, compile_kernel

ROOT = Path(__file__).parents[3]
# Loads of a row's own numbers by each program: number and bytes. The label's column is an int64.
ROW_LOADS = {"statistics": {}, "gradient": {"8": 1, "4": 3}, "gradient with entropy": {"8": 1, "4": 4}}
ROW_STORES = {"statistics": {"4": 3}, "gradient": {}, "gradient with entropy": {}}
PINS = {
    name: re.search(r"^triton==(\S+)", (ROOT / "requirements" / name).read_text(), re.M)
    for name in ("cpu.txt", "gpu-vllm.txt", "gpu-sglang.txt")
}


@pytest.fixture(scope="module", autouse=True)
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile for real, whatever an earlier run left in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.full
@pytest.mark.parametrize("logits", ["bf16", "fp32"])
@pytest.mark.parametrize("kernel", VARIANTS)
@pytest.mark.parametrize(
    ("arch", "shape"), [(90, "real columns % 16 == 0"), *((arch, "real columns odd") for arch in ARCHITECTURES)]
)
def test_no_spills_and_16_byte_accesses(arch: int, kernel: str, logits: str, shape: str) -> None:
    """Every logit moves in a 16-byte access, also where the real columns are odd, and the occupancy is the committed one."""
    found = compile_kernel(kernel, logits, shape, arch)
    vectors = {"16": found.vectors_of_a_block()}
    assert found.spills == found.stack == 0
    assert found.loads == vectors | ROW_LOADS[kernel]
    assert found.stores == ROW_STORES[kernel] or found.stores == vectors | ROW_STORES[kernel]
    assert (found.stores == ROW_STORES[kernel]) == (kernel == "statistics")
    assert found.warps >= 24, found.registers
    committed = [x for x in triton_aot.load() if key(x) == key(found)]
    if triton.__version__ in {x.triton for x in triton_aot.load()}:
        assert len(committed) == 1
        assert found.warps >= committed[0].warps, f"{found.registers} registers, {committed[0].registers} in {OUT.name}"


def key(x: CompiledKernel) -> tuple[str, int, str, str, str]:
    return x.triton, x.arch, x.kernel, x.logits, x.shape


@pytest.mark.parametrize("pin", PINS)
def test_the_committed_file_names_every_pinned_triton(pin: str) -> None:
    """A test that fails here after a change of pins asks for `python -m benchmarks.triton_aot` under the new version."""
    version = PINS[pin]
    assert version is not None
    rows = [x for x in triton_aot.load() if x.triton == version[1]]
    assert len(rows) == len(ARCHITECTURES) * len(VARIANTS) * 2 * len(RECORDED_SHAPES)
    for x in rows:
        assert x.spills == x.stack == 0 and x.loads["16"] == x.vectors_of_a_block() and re.match(r"\d+\.\d+", x.ptxas)
        assert x.warps == triton_aot.resident_warps(x.registers, x.shared, 8)
