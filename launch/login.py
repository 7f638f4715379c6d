"""Call launch on a login node from another machine, such as a laptop: `python -m launch --login HOST:FOLDER WORDS...`.

FOLDER is a clone of this project on the login node, in which `make launch` was called; it is the working directory there. The
commit of this checkout is pushed to it, through the user's own ssh with its keys, agent, configuration and known hosts, and
everything else happens there: the preflight, the snapshot, the submission and its record.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from launch import checks, snapshot
from launch.profile import load_cluster
from launch.snapshot import SOURCE
from tepo_megatron.errors import ConfigError
from tepo_megatron.utils.escaping import escaped

_PYTHON, _HOME = ".venv-launch/bin/python", ".launch"  # in the folder on the login node
_ASKING = ("status", "logs", "cancel", "attach", "save")
_PUSH_SECONDS = 600
# One checkout for all calls, so one call at a time. The lock ends with this shell.
_SCRIPT = """set -euo pipefail
cd -- {folder}
mkdir -p {home}/files
exec 9> {home}/lock
flock 9
git worktree prune
[ -e {home}/checkout ] || git worktree add --quiet --force --detach {home}/checkout {commit}
git -C {home}/checkout checkout --quiet --force --detach {commit}
git update-ref -d refs/launch/{commit}
{lines}
export PYTHONSAFEPATH=1 PYTHONPATH="$PWD"/{home}/checkout
{python} -m launch {words} < /dev/null 9>&-
"""


def call(place: str, words: Sequence[str]) -> int:
    """Call `python -m launch WORDS` on a login node and return its exit status; ssh's own errors have 255.

    The values of the profile's secrets are sent through ssh and are in no file and no command line.

    Args:
        place: HOST:FOLDER. HOST is a name that ssh knows; FOLDER is absolute, or relative to the home folder there.
        words: Words of the call. CONFIG and the profile of --cluster are files here; all other paths are paths there.

    Raises:
        ConfigError: The checkout differs from its commit, a file is missing, or the commit cannot be pushed.
    """
    host, _, folder = place.partition(":")
    if not re.fullmatch(r"[A-Za-z0-9_][\w.@%-]*", host) or not folder or folder.startswith("-"):
        raise ConfigError(f"--login {place}: give HOST:FOLDER, a host that ssh knows and the clone's folder there")
    if words and words[0] in _ASKING:
        tty = ["-t"] if words[0] == "attach" else []
        return _ssh([*tty, host, f"cd -- {shlex.quote(folder)} && {_PYTHON} -m launch {shlex.join(words)}"])
    code = snapshot.read()
    if code.commit is None:
        raise ConfigError(f"--login: {SOURCE} is no git checkout, and a commit of one is sent; call launch in a clone")
    if "--allow-dirty" in words:
        raise ConfigError("--login sends a commit; leave out --allow-dirty, and commit the changes")
    code.refuse_changes()
    lines, sent = _with_files(words, code.commit)
    _push(f"{host}:{folder}", code.commit)
    texts = {"folder": shlex.quote(folder), "lines": "\n".join(lines), "words": shlex.join(sent)}
    script = _SCRIPT.format(home=_HOME, commit=code.commit, python=_PYTHON, **texts)
    return _ssh(["-T", host, "bash -s"], script)


def _with_files(words: Sequence[str], commit: str) -> tuple[list[str], list[str]]:
    """Return shell lines that write the files of a call and export its secrets, and the words with the files' paths there."""
    lines, sent = [], list(words)
    profile = next((i + 1 for i, word in enumerate(words[:-1]) if word == "--cluster"), None)
    is_run = bool(words) and words[0] not in ("convert", "evaluate", "doctor")
    for i in [*([0] if is_run else []), *([] if profile is None else [profile])]:
        path = Path(words[i])
        if not path.is_file():
            raise ConfigError(f"--login: {path} is no file here; CONFIG and the profile of --cluster are sent from here")
        inside = _in_commit(path, commit)
        if inside is None:
            sent[i] = f"{_HOME}/files/{path.name}"
            lines.append(f"printf %s {shlex.quote(path.read_text())} > {shlex.quote(sent[i])}")
        else:
            sent[i] = f"{_HOME}/checkout/{inside}"
    if profile is not None:
        cluster = load_cluster(words[profile])
        if "--dry-run" not in words:
            checks.check_secrets(cluster)
            lines += [f"export {name}={shlex.quote(os.environ[name])}" for name in cluster.secrets]
    return lines, sent


def _in_commit(path: Path, commit: str) -> Path | None:
    """Return the path of a file in the checkout if the commit has the same content. None: it has not."""
    file = path.resolve()
    if not file.is_relative_to(SOURCE):
        return None
    inside = file.relative_to(SOURCE)
    shown = subprocess.run(["git", "-C", str(SOURCE), "show", f"{commit}:{inside}"], capture_output=True, check=False)
    return inside if shown.returncode == 0 and shown.stdout == file.read_bytes() else None


def _push(place: str, commit: str) -> None:
    """Push the commit to the clone. Raise ConfigError with git's message."""
    words = ["git", "-C", str(SOURCE), "push", "--quiet", place, f"{commit}:refs/launch/{commit}"]
    try:
        done = subprocess.run(words, stderr=subprocess.PIPE, text=True, errors="replace", timeout=_PUSH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--login {place}: git push did not end within {_PUSH_SECONDS} s; try it yourself") from None
    if done.returncode:
        said = escaped(" ".join(done.stderr.split()))
        raise ConfigError(f"--login {place}: {said}; `ssh` has to reach it without questions, and the folder is a clone")


def _ssh(words: Sequence[str], script: str | None = None) -> int:
    """Call ssh and return its exit status.

    Args:
        words: Its words.
        script: Text for its standard input. None: that of this process.
    """
    try:
        return subprocess.run(["ssh", *words], input=script, text=True, check=False).returncode
    except FileNotFoundError:
        raise ConfigError("ssh is not installed here; install OpenSSH's client") from None
