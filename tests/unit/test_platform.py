"""The CPU platform in this process (see conftest.py), and what activation refuses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tepo_megatron import platform
from tepo_megatron.errors import ConfigError
from tepo_megatron.platform.adam import HostAdam
from tepo_megatron.platform.mcore import provide_triton_to_paged_stash
from tests.tiny import tiny_qwen3


def python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=600)


def test_the_platform_is_the_configs_choice() -> None:
    cpu = platform.activate("cpu")
    assert (cpu.name, cpu.backend, cpu.device(1)) == ("cpu", "gloo", torch.device("cpu"))
    assert platform.activate("cpu") is cpu
    with pytest.raises(RuntimeError, match="platform cpu is active"):
        platform.activate("cuda")


def test_cuda_without_a_gpu_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "_active", None)
    with pytest.raises(ConfigError, match=r"platform=cuda.*use platform=cpu"):
        platform.activate("cuda")


def test_cuda_redirects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "_active", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    watched = [torch, torch.Tensor, torch.cuda, torch.cuda.random, torch.distributed]
    before = [dict(vars(owner)) for owner in watched]
    cuda = platform.activate("cuda")
    assert (cuda.name, cuda.backend, cuda.device(3)) == ("cuda", "nccl", torch.device("cuda", 3))
    assert [dict(vars(owner)) for owner in watched] == before


def test_activation_after_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "_active", None)
    with pytest.raises(RuntimeError, match="imported before"):
        platform.activate("cpu")


def test_import_is_light() -> None:
    code = "import sys, tepo_megatron.platform; print('megatron' in sys.modules)"
    assert python(code).stdout.strip() == "False"


@pytest.mark.full
def test_cpu_on_a_machine_with_gpus(tmp_path: Path) -> None:
    """Eight GPUs, Transformer Engine and Apex, all of which fail when touched; and no warning on the way."""
    for name in ("transformer_engine", "apex"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a GPU package was imported')")
    code = f"""
import os, sys
sys.path.insert(0, {str(tmp_path)!r})
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 8
torch.version.cuda = "13.0"
def fail(*a, **k): raise SystemExit("the GPU was touched")
torch.cuda._lazy_init = torch._C._cuda_init = torch.cuda.set_device = torch.cuda.synchronize = fail
from tepo_megatron.platform import activate
assert activate("cpu").device(5) == torch.device("cpu")
assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.utils import GlobalMemoryBuffer
assert not HAVE_TE
assert GlobalMemoryBuffer().get_tensor((2, 3), torch.float32, "x").device.type == "cpu"
"""
    done = python(code, "-W", "error::UserWarning")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_gpu_devices_mean_the_cpu() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    made = [
        torch.zeros(2, device="cuda"),
        torch.tensor([1], device=torch.device("cuda", 1)),
        torch.empty(2, device=0, pin_memory=True),
        torch.arange(3, device=torch.cuda.current_device()),
        torch.empty_like(x, device="cuda:1"),
        x.cuda(),
        x.to("cuda", torch.float32),
        x.to(device=0),
        x.pin_memory(),
        torch.nn.Linear(2, 2).cuda().weight,
        torch.nn.Linear(2, 2).to("cuda").weight,
    ]
    assert {t.device.type for t in made} == {"cpu"}
    assert made[6].dtype == torch.float32 and x.to(torch.float64).dtype == torch.float64


def test_only_megatron_sees_cuda_tensor_types() -> None:
    x = torch.ones(2, dtype=torch.bfloat16)
    assert x.type() == "torch.BFloat16Tensor" and x.type(torch.float32).dtype == torch.float32
    inside = {"__name__": "megatron.core.optimizer"}
    exec("def name(x): return x.type()", inside)
    assert inside["name"](x) == "torch.cuda.BFloat16Tensor"


def test_streams_events_and_memory() -> None:
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    assert stream == torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        start.record()
        time.sleep(0.01)
        end.record(stream)
    stream.wait_event(end)
    assert 10 <= start.elapsed_time(end) < 60_000
    assert torch.cuda.memory_allocated() == 0


def test_meta_device_context_still_works(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        assert torch.zeros(2).device.type == torch.tensor([1.0]).device.type == "meta"
        assert torch.zeros(2, device="cpu").device.type == "cpu"
    tiny_qwen3(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    state = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert weights.keys() <= state.keys()
    assert all(torch.equal(state[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("decoupled", [True, False])
def test_host_adam_equals_torch(decoupled: bool) -> None:
    reference = torch.optim.AdamW if decoupled else torch.optim.Adam
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    torch.manual_seed(0)
    ours = [torch.randn(3, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64), torch.zeros(0)]
    theirs = [p.clone().requires_grad_() for p in ours]
    ours = [p.clone().requires_grad_() for p in ours]
    a, b = HostAdam(ours, adam_w_mode=decoupled, **settings), reference(theirs, **settings)
    for step in range(6):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
        if step == 2:  # a fresh optimizer continues from the state
            saved = a.state_dict()
            a = HostAdam(ours, adam_w_mode=decoupled, lr=0.0)
            a.load_state_dict(saved)
    assert a.param_groups[0]["step"] == 6
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_host_adam_leaves_parameters_without_gradient() -> None:
    p = torch.ones(2, requires_grad=True)
    HostAdam([p], weight_decay=0.5).step()
    assert torch.equal(p, torch.ones(2))


def test_paged_stash_is_lent_an_empty_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form in which Megatron-Core 0.18 and later define their kernels."""
    for name in ("triton", "triton.language"):  # where it is installed nothing is lent: see to it that none is found
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "paged_stash.py").write_text(
        "import triton\n"
        "import triton.language as tl\n"
        "@triton.jit\n"
        "def kernel(n: tl.constexpr): return triton.__spec__ is None\n"
    )
    before = sys.meta_path
    monkeypatch.setattr(sys, "meta_path", [*before])
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name, package=None: None)
        provide_triton_to_paged_stash()
    (finder,) = (each for each in sys.meta_path if each not in before)
    spec = finder.find_spec("megatron.core.transformer.moe.paged_stash", [str(tmp_path)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.kernel(1)
    assert "triton" not in sys.modules
    assert finder.find_spec("elsewhere.paged_stash", [str(tmp_path)]) is None
