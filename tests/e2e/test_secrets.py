"""Keys come by the environment, and a real run writes, prints and passes on none of them."""

import re
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.e2e.conftest import Command
from tests.living_folder import files_below

pytestmark = [pytest.mark.server, pytest.mark.e2e, pytest.mark.full]
GIVEN = ("WANDB_API_KEY", "HF_TOKEN", "TEPO_SERVER_KEY", "OPENAI_API_KEY")
OF_SERVER = re.compile(rb"(?:^|\0)(?:VLLM_API_KEY|TEPO_SGLANG_KEY)=([^\0]+)")
SHORT = {
    "training__steps": 2, "training__minibatch_prompts": 4, "rollout__prompts_per_step": 8, "rollout__samples_per_prompt": 2,
    "rollout__filter_uniform_groups": "false", "rollout__max_response_tokens": 8, "rollout__record": "true",
    "checkpoint__every": 1, "evaluation__max_problems": 8,
}  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_run_tells_no_secret(
    tepo: Callable[..., Command], arguments: Callable[..., list[str]], random_model: Path, tmp_path: Path, engine: str
) -> None:
    given = {name: f"not-for-any-file-{secrets.token_hex(8)}" for name in GIVEN}
    run = tmp_path / "runs" / "told"
    words = arguments(random_model, **SHORT, name="told", rollout__engine=engine, sync__transport__folder=tmp_path / "weights")
    command = tepo(*words, env=given)
    command.until(lambda: "accuracy at step 0" in command.output, timeout=300)
    lines = command.left_over()
    keys = keys_of_servers(lines)
    assert len(keys) == 1 and len(next(iter(keys))) >= 32  # generated for this server
    hidden = [*given.values(), *keys]
    assert not [line for line in lines if any(secret in line for secret in hidden)]
    assert command.wait(240) == 0, command.output
    assert command.log.is_relative_to(tmp_path) and (run / "server.log").exists() and (run / "rollouts").exists()
    assert files_with(hidden, tmp_path) == []

    command = tepo(*words, "--name", "refused", "--rollout.server.extra_args", "['--no-such-option']", env=given)
    assert command.wait(240) == 1 and "no-such-option" in command.output, command.output
    assert files_with(given.values(), tmp_path) == []


def keys_of_servers(lines: Iterable[str]) -> set[str]:
    """Return the keys of the servers among these processes ("PID COMMAND"), which their owner can read in their environment."""
    found = set()
    for line in lines:
        try:
            found |= {key.decode() for key in OF_SERVER.findall(Path(f"/proc/{line.split()[0]}/environ").read_bytes())}
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def files_with(hidden: Iterable[str], folder: Path) -> list[Path]:
    needles = [secret.encode() for secret in hidden]
    files = files_below(folder)
    assert files
    return [path for path in files if any(needle in path.read_bytes() for needle in needles)]
