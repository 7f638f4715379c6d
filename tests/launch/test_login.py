"""`python -m launch --login` from a laptop: a real ssh and sshd on this machine, and a Slurm that only takes jobs."""

import contextlib
import getpass
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from launch.__main__ import main
from launch.command_line import parse
from launch.login import LoginFiles
from tepo_megatron.base.errors import ConfigError
from tests.launch.cases import PYTHON, ROOT, SECRET, files_with_secret
from tests.launch.test_jobs import COMMANDS, TREE
from tests.launch.test_snapshot import git
from tests.slurm import free_port

SBIN = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
SSHD = shutil.which("sshd", path=SBIN)
MISSING = "no sshd or no ssh-keygen (Debian: openssh-server); or this user is not root, whom sshd needs to open a session"
needs_sshd = pytest.mark.skipif(SSHD is None or shutil.which("ssh-keygen") is None or os.geteuid() != 0, reason=MISSING)


@dataclass(frozen=True)
class Login:
    """A login node.

    Attributes:
        laptop: Clone of this project from which launch is called.
        site: Clone on the login node.
    """

    laptop: Path
    site: Path
    environment: dict[str, str]

    def call(self, *words: str) -> list[str]:
        """Return the words of a command that calls launch on the login node."""
        return [str(PYTHON), "-m", "launch", "--login", f"cluster:{self.site}", *words]

    def launch(self, *words: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Call launch on the login node from the laptop."""
        environment, call = self.environment, self.call(*words)
        return subprocess.run(
            call, cwd=self.laptop, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )  # fmt: skip


@pytest.fixture
def login(tmp_path: Path) -> Iterator[Login]:
    laptop, site, etc = (tmp_path / name for name in ("laptop", "site", "etc"))
    for folder in (laptop, site):
        git(tmp_path, "clone", "--quiet", str(ROOT), str(folder))
    (site / ".venv-launch").symlink_to(ROOT / ".venv-launch")
    etc.mkdir()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", etc / name], check=True)
    bins = {"sbatch": f'[ "$WANDB_API_KEY" = {SECRET} ] && touch "{tmp_path}/secret"\n{COMMANDS["sbatch"]}'}
    for name, body in (COMMANDS | bins).items():
        (etc / name).write_text(f"#!/bin/bash\n{body.replace('{0}', str(tmp_path))}\n")
        (etc / name).chmod(0o755)
    port = free_port()
    (etc / "known").write_text(f"[127.0.0.1]:{port} {(etc / 'host.pub').read_text()}")
    (etc / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {etc}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {etc}/user.pub\nPermitRootLogin prohibit-password\nSetEnv PATH={etc}:{SBIN}\n"
    )
    (etc / "ssh_config").write_text(
        f"Host cluster\nHostName 127.0.0.1\nPort {port}\nUser {getpass.getuser()}\nIdentityFile {etc}/user\n"
        f"IdentitiesOnly yes\nUserKnownHostsFile {etc}/known\nStrictHostKeyChecking accept-new\nBatchMode yes\n"
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/bash\nexec {shutil.which("ssh")} -F {etc}/ssh_config "$@"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(laptop)}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "WANDB_API_KEY": SECRET}
    Path("/run/sshd").mkdir(exist_ok=True)
    assert SSHD is not None
    with (etc / "log").open("w") as log, subprocess.Popen([SSHD, "-D", "-e", "-f", etc / "sshd_config"], stderr=log) as sshd:
        try:
            deadline = time.monotonic() + 30
            while "Server listening" not in (etc / "log").read_text():
                assert sshd.poll() is None and time.monotonic() < deadline, (etc / "log").read_text()
                time.sleep(0.05)
            yield Login(laptop, site, environment)
        finally:
            with contextlib.suppress(ProcessLookupError):
                sshd.terminate()


@needs_sshd
@pytest.mark.e2e
def test_a_commit_of_a_laptop_is_submitted_on_the_login_node(login: Login) -> None:
    (login.laptop / "run.yaml").write_text(yaml.safe_dump(TREE))  # is in no commit, and so it is sent
    profile = {"secrets": ["WANDB_API_KEY"], "environment": {"NOTE": "it's here"}, "slurm": {"account": "lab"}}
    (login.laptop / "mine.yaml").write_text(yaml.safe_dump(profile))
    (login.laptop / "launch" / "__init__.py").write_text("# a newer commit\n")
    words = ["run.yaml", "--executor", "slurm", "--cluster", "mine.yaml", "--no-preflight"]
    refused = login.launch(*words)
    assert refused.returncode == 1 and "differs from its commit: launch/__init__.py" in refused.stderr, refused.stderr
    git(login.laptop, "commit", "--quiet", "--all", "--message", "newer")
    commit = git(login.laptop, "rev-parse", "HEAD").strip()
    done = login.launch(*words)
    assert done.returncode == 0 and done.stdout == "job 47; python -m launch status|logs|cancel|attach runs/a\n", done.stderr
    run = login.site / "runs" / "a"
    assert json.loads((run / "launch" / "jobs" / "1" / "code.json").read_text())["commit"] == commit
    (snapshot,) = (run / "launch" / "code").iterdir()
    assert snapshot.name == commit[:12] and "newer" in (snapshot / "launch" / "__init__.py").read_text()
    assert (login.site.parent / "secret").exists(), "the value of a secret has not reached sbatch"
    assert files_with_secret(run) == files_with_secret(login.site / ".launch" / "files") == []
    assert git(login.site, "for-each-ref", "refs/launch") == ""
    assert git(login.site, "status", "--porcelain") == "?? .venv-launch\n"  # which is a folder elsewhere, and ignored
    status = login.launch("status", "runs/a")
    assert status.returncode == 0 and status.stdout.startswith("job 1: slurm job 47, submitted "), status.stderr
    again = login.launch(*words)
    assert again.returncode == 1 and "job 1 of this run (slurm job 47) has not ended" in again.stderr
    assert login.launch("cancel", "runs/a").stdout == "job 47 is cancelled\n"


@needs_sshd
@pytest.mark.e2e
def test_an_unknown_host_and_a_folder_that_is_no_clone_are_refused(login: Login) -> None:
    words = ["examples/demo.yaml", "--executor", "slurm", "--dry-run"]
    shutil.rmtree(login.site / ".git")
    no_clone = login.launch(*words)
    assert no_clone.returncode == 1 and "does not appear to be a git repository" in no_clone.stderr, no_clone.stderr
    (login.site.parent / "etc" / "known").write_text("")
    unknown = login.launch(*words)
    assert unknown.returncode == 1 and "Host key verification failed" in unknown.stderr, unknown.stderr
    assert login.launch("status", "runs/a").returncode == 255
    assert (login.site.parent / "etc" / "known").read_text() == "", "the key of an unknown host was accepted"


def test_the_secrets_of_a_profile_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tree in {"run": TREE, "mine": {"secrets": ["WANDB_API_KEY"], "slurm": {"account": "lab"}}}.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    words = [f"{tmp_path}/run.yaml", "--executor", "slurm", "--cluster", f"{tmp_path}/mine.yaml"]
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    files = LoginFiles("c" * 40, "files")
    sent = files.send(parse(words))
    assert sent == ["files/config-run.yaml", "--executor=slurm", "--cluster=files/cluster-mine.yaml"]
    assert SECRET in "\n".join(files.lines)
    monkeypatch.delenv("WANDB_API_KEY")
    with pytest.raises(ConfigError, match="WANDB_API_KEY is not set"):
        LoginFiles("c" * 40, "files").send(parse(words))


@pytest.mark.parametrize(
    "words",
    [
        "run.yaml",
        "--executor slurm --cluster p.yaml run.yaml --dry-run",
        "run.yaml --parallel.tp 2 --after=runs/a --cluster=p.yaml --rollout.top_p=-1 --no-preflight",
        "--data.shuffle run.yaml --allow-dirty name=b",
        "convert runs/a --executor slurm --after runs/b -- --executor slurm --dry-run",
        "evaluate runs/a --unknown 3 --dry-run",
    ],
)
def test_the_words_of_a_parsed_call_mean_the_same_call(words: str) -> None:
    call = parse(words.split())
    assert parse(call.words) == call


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["run.yaml"], "--executor local would train on the login node; give --executor slurm"),
        (["evaluate", "runs/a", "--executor=local"], "--executor local would train on the login node"),
        (["run.yaml", "--executor", "slurm", "--allow-dirty"], "leave out --allow-dirty"),
        (["no.yaml", "--executor", "slurm"], "no.yaml is no file here"),
        (["doctor", "--cluster=no.yaml"], "no.yaml is no file here"),
    ],
)
def test_a_call_that_makes_no_sense_on_a_login_node_is_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--login", "cluster:tepo", *words]) == 1
    assert reason in capsys.readouterr().err
