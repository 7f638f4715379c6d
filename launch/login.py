"""Call launch on a login node from another machine, such as a laptop: `python -m launch --login HOST:FOLDER WORDS...`.

FOLDER is a clone of this project on the login node, in which `make launch` was called; it is the working directory there. The
commit of this checkout is pushed to it, through the user's own ssh with its keys, agent, configuration and known hosts, and
everything else happens there: the preflight, the snapshot, the submission and its record.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch import checks, command_line, snapshot
from launch.command_line import LaunchCall
from launch.profile import load_cluster
from launch.snapshot import SOURCE
from tepo_megatron.base.errors import ConfigError, escaped

_PYTHON, _HOME = ".venv-launch/bin/python", ".launch"  # in the folder on the login node
_ASKING = ("status", "logs", "cancel", "attach", "save")
_STRICT = ("-o", "StrictHostKeyChecking=yes")
# Limit since `git push` or `git show`: a clone on a cold file system takes minutes; then `did not end within`
_PUSH_SECONDS = 600
_LOCK_SECONDS = 60  # limit since another call on the login node: it only checks out a commit; then the call fails and says so
_UNUSED_DAYS = 30
# Each commit has a checkout of its own, which no later call changes, because Python imports from it until the call has ended.
# The lock is held only until the checkout and the files are complete. A folder counts as a checkout only if git finds this
# folder and the clone's repository from it: without its .git file, git would find the clone itself and change its files.
_SCRIPT = """set -euo pipefail
cd -- {folder}
mkdir -p {home}/checkouts {files}
trap 'rm -rf {files}; git update-ref -d {ref} || true' EXIT
exec 9> {home}/lock
flock -w {seconds} 9 || {{
  echo "launch: error: another --login call holds $PWD/{home}/lock; wait until it has ended, and call again" >&2
  exit 1
}}
export GIT_OPTIONAL_LOCKS=0
repository="$(git rev-parse --path-format=absolute --git-common-dir)"
found="$(git -C {checkout} rev-parse --path-format=absolute --show-toplevel --git-common-dir 2> /dev/null || true)"
if [ "$found" != "$(printf '%s\n%s' "$(pwd -P)/{checkout}" "$repository")" ]; then
  rm -rf {checkout}
  git worktree add --quiet --force --force --detach {checkout} {commit}
elif [ "$(git -C {checkout} rev-parse HEAD)" != {commit} ] || ! git -C {checkout} diff --quiet HEAD; then
  rm -f "$(git -C {checkout} rev-parse --path-format=absolute --git-path index.lock)"
  git -C {checkout} checkout --quiet --force --detach {commit}
fi
touch {checkout}
for old in $(find {home}/checkouts {home}/files -mindepth 1 -maxdepth 1 -mtime +{days}); do
  git worktree remove --force "$old" 2> /dev/null || rm -rf "$old"
done
{lines}
exec 9>&-
export PYTHONSAFEPATH=1 PYTHONPATH="$PWD"/{checkout}
{python} -m launch {words} < /dev/null
"""


def call(place: str, words: Sequence[str]) -> int:
    """Call `python -m launch WORDS` on a login node and return its exit status; ssh's own errors have 255.

    The values of the profile's secrets are sent through ssh and are in no file and no command line.
    """
    host, _, folder = place.partition(":")
    if folder.startswith("~"):
        raise ConfigError(f"--login {place}: no shell replaces ~ there; give FOLDER relative to the home folder, or absolute")
    if not re.fullmatch(r"[A-Za-z0-9_][\w.@%-]*", host) or not folder or folder.startswith("-"):
        raise ConfigError(f"--login {place}: give HOST:FOLDER, a host that ssh knows and the clone's folder there")
    if words and words[0] in _ASKING:
        tty = ["-t"] if words[0] == "attach" else []
        return _ssh([*tty, host, f"cd -- {shlex.quote(folder)} && {_PYTHON} -m launch {shlex.join(words)}"])
    code = snapshot.read()
    if code.commit is None:
        raise ConfigError(f"--login: {SOURCE} is no git checkout, and a commit of one is sent; call launch in a clone")
    name = secrets.token_hex(8)
    ref, files = f"refs/launch/{name}", LoginFiles(code.commit, f"{_HOME}/files/{name}")
    sent = files.send_doctor(words[1:]) if words and words[0] == "doctor" else files.send(command_line.parse(words))
    code.refuse_changes()
    _push(f"{host}:{folder}", code.commit, ref)
    texts = {"folder": shlex.quote(folder), "lines": "\n".join(files.lines), "words": shlex.join(sent)}
    texts |= {
        "home": _HOME,
        "ref": ref,
        "files": files.folder,
        "checkout": files.checkout,
        "commit": code.commit,
        "python": _PYTHON,
    }
    return _ssh(["-T", host, "bash -s"], _SCRIPT.format(seconds=_LOCK_SECONDS, days=_UNUSED_DAYS, **texts))


@dataclass
class LoginFiles:
    """The files of a call on the login node."""

    commit: str
    folder: str  # folder there for files that the commit does not have
    lines: list[str] = field(default_factory=list)  # shell lines that write these files and export the secrets

    @property
    def checkout(self) -> str:
        """Return the path of the commit's checkout there."""
        return f"{_HOME}/checkouts/{self.commit}"

    def send(self, call: LaunchCall) -> list[str]:
        """Return the words there of a run's or a command's start."""
        args = call.args
        if args.executor == "local":
            raise ConfigError("--login: --executor local would train on the login node; give --executor slurm")
        if args.allow_dirty:
            raise ConfigError("--login sends a commit; leave out --allow-dirty, and commit the changes")
        if call.kind == "train":
            args.target = self._sent("config", args.target)
        if args.cluster is not None:
            profile, args.cluster = args.cluster, self._sent("cluster", args.cluster)
            cluster = load_cluster(profile)
            checks.check_secrets(cluster)
            self.lines += [f"export {name}={shlex.quote(os.environ[name])}" for name in cluster.secrets]
        return call.words

    def send_doctor(self, words: Sequence[str]) -> list[str]:
        """Return the words there of a call of `doctor`, which reads no secrets."""
        profile = self._sent("cluster", command_line.doctor_args(words).cluster)
        return ["doctor", *words, f"--cluster={profile}"]  # the last --cluster is the one that counts

    def _sent(self, kind: str, name: str) -> str:
        """Return the path of a file there: in the checkout if the commit has the same content."""
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"--login: {path} is no file here; CONFIG and the profile of --cluster are sent from here")
        inside = _in_commit(path, self.commit)
        if inside is not None:
            return f"{self.checkout}/{inside}"
        sent = f"{self.folder}/{kind}-{path.name}"
        self.lines.append(f"printf %s {shlex.quote(path.read_text())} > {shlex.quote(sent)}")
        return sent


def _in_commit(path: Path, commit: str) -> Path | None:
    """Return the path of a file in the checkout if the commit has the same content. None: it has not."""
    file = path.resolve()
    if not file.is_relative_to(SOURCE):
        return None
    inside = file.relative_to(SOURCE)
    words = ["git", "-C", str(SOURCE), "show", f"{commit}:{inside}"]
    shown = subprocess.run(words, capture_output=True, timeout=_PUSH_SECONDS, check=False)
    return inside if shown.returncode == 0 and shown.stdout == file.read_bytes() else None


def _push(place: str, commit: str, ref: str) -> None:
    """Push a commit to the clone. Raise ConfigError with git's message."""
    words = ["git", "-C", str(SOURCE), "push", "--quiet", place, f"{commit}:{ref}"]
    # Git's own settings of ssh are for its usual servers; this is the ssh of the call that follows, which runs the script.
    environment = os.environ | {"GIT_SSH_COMMAND": shlex.join(["ssh", *_STRICT]), "GIT_SSH_VARIANT": "ssh"}
    try:
        done = subprocess.run(
            words, stderr=subprocess.PIPE, text=True, errors="replace", timeout=_PUSH_SECONDS, check=False, env=environment
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--login {place}: git push did not end within {_PUSH_SECONDS} s; try it yourself") from None
    if done.returncode:
        said = escaped(" ".join(done.stderr.split()))
        raise ConfigError(f"--login {place}: {said}; `ssh` has to reach it without questions, and the folder is a clone")


def _ssh(words: Sequence[str], script: str | None = None) -> int:
    """Call ssh and return its exit status."""
    try:
        return subprocess.run(["ssh", *_STRICT, *words], input=script, text=True, check=False).returncode
    except FileNotFoundError:
        raise ConfigError("ssh is not installed here; install OpenSSH's client") from None
