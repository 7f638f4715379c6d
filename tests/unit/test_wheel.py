"""What a wheel of the package holds: `tepo doctor` works where it is installed with its requirements, without a checkout."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.tiny import tiny_qwen3

ROOT = Path(__file__).parents[2]
CONFIG = """
name: run
platform: cpu
model: {path: ./model}
data: {train: ./train.jsonl, max_prompt_tokens: 16}
rollout: {prompts_per_step: 4, samples_per_prompt: 2, max_response_tokens: 16}
training: {minibatch_prompts: 4, max_tokens_per_microbatch: 64}
objective: {name: tepo}
"""


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_has_a_working_doctor(tmp_path: Path) -> None:
    def run(*command: object) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    source, site = tmp_path / "source", tmp_path / "empty" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    shutil.copytree(ROOT / "tepo_megatron", source / "tepo_megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", source, "--no-build-isolation", "--no-deps", "--quiet", "--wheel-dir", "wheels")
    run(sys.executable, "-m", "venv", "--without-pip", "empty")
    # the packages that the wheel requires; no .pth file is read there, so the checkout is not among them
    (site / "required.pth").write_text(sysconfig.get_path("purelib"))
    (wheel,) = (tmp_path / "wheels").iterdir()
    run(sys.executable, "-m", "pip", "--python", "empty/bin/python", "install", "--no-deps", "--quiet", wheel)
    tiny_qwen3(tmp_path / "model", layers=2)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "1+{i}?", "answer": "{1 + i}"}}\n' for i in range(8)))
    (tmp_path / "run.yaml").write_text(CONFIG)
    assert str(site) in run("empty/bin/python", "-c", "import tepo_megatron; print(tepo_megatron.__file__)")
    assert " pass, " in run("empty/bin/tepo", "doctor", "run.yaml", "--quick")
