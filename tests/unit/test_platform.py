"""The CPU platform in this process (see conftest.py), and what activation refuses."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.dist import platform
from tepo_megatron.dist.platform.mcore import HostAdam


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


def test_activation_after_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "_active", None)
    with pytest.raises(RuntimeError, match="imported before"):
        platform.activate("cpu")


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
from tepo_megatron.dist.platform import activate
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
