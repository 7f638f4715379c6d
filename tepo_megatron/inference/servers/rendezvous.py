"""A folder in which servers publish their addresses, and trainers mark the servers that they use. All machines of a run see it.

    key                       the key that every server requires, unless TEPO_SERVER_KEY gives it
    HOST-PORT.json            a healthy server, as a `Record`
    HOST-PORT.START.taken     the run that uses this start (incarnation) of the server
    HOST-PORT.START.end       why its user ended this start: the server has to be restarted
    HOST-PID.keeper           a running `tepo serve`, and the last lease token that it acknowledged
    turn                      the device lease (`quiesce.py`): the run that has the servers' devices, the starts that it
                              keeps, and a token for the acknowledgements

Every file appears under its name only when it is complete. The folder belongs to its owner alone: whoever could write a record
would be sent the key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tepo_megatron.errors import ConfigError, RolloutError
from tepo_megatron.utils.atomic import replacing, sync

KEY_VARIABLE = "TEPO_SERVER_KEY"
KEY_FILE = "key"
SHORTEST_KEY = 16  # characters
_TURN, _KEEPER = "turn", "keeper"
_READS = 5


@dataclass(frozen=True)
class Record:
    """One start of a served engine, as `tepo serve` publishes it once the server is healthy."""

    engine: str
    engine_version: str
    url: str
    run: str  # name in the config of `tepo serve`
    tp: int
    model: str  # `fingerprint` of the loaded model
    max_model_len: int
    precision: str
    host: str  # of the `tepo serve` that runs it
    pid: int  # of the `tepo serve`
    start: str  # unique id of this start
    log: str  # path on `host`
    sleeps: bool = False  # started with sleep mode enabled

    @property
    def stem(self) -> str:
        """HOST-PORT, unique among live servers."""
        return f"{self.host}-{self.url.rpartition(':')[2]}"

    @property
    def keeper(self) -> str:
        """HOST-PID of the `tepo serve` that runs the server."""
        return keeper_name(self.host, self.pid)

    @property
    def where(self) -> str:
        """Address of the server for messages, with its pid, host and log."""
        return f"{self.url} (of pid {self.pid} on {self.host}, log {self.log})"


@dataclass(frozen=True)
class DeviceLease:
    """Device lease: `run` has the devices of the servers, and all starts except `starts` have to end."""

    run: str
    token: str  # `tepo serve` acknowledges the lease with it
    starts: tuple[str, ...]  # of servers of `run`, which has put them to sleep or is about to


def keeper_name(host: str, pid: int) -> str:
    """Return HOST-PID, which identifies a `tepo serve`.

    Args:
        host, pid: Host name and process id of the `tepo serve`.
    """
    return f"{host}-{pid}"


def fingerprint(model: Path) -> str:
    """Return the SHA-256 of the model's config.json, in hexadecimal. Raises ConfigError if it cannot be read."""
    try:
        return sha256((model / "config.json").read_bytes()).hexdigest()
    except OSError as e:
        raise ConfigError(
            f"model.path={model}: cannot read config.json ({e.strerror}); give a Hugging Face directory"
        ) from None


class Rendezvous:
    """The rendezvous folder; `tepo serve` and the trainer both use this class."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self) -> None:
        """Make the folder if it is missing. Raises ConfigError if others could put records into it."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"rollout.server.rendezvous={self.folder}: cannot be made ({e.strerror}); give another") from None
        self.check()

    def check(self) -> None:
        """Raise ConfigError unless only this user or root can change the folder. A folder that does not exist passes.

        Both sides check before they read anything, because whoever writes a record is sent the key and the weights.
        """
        name = f"rollout.server.rendezvous={self.folder}"
        try:
            if self.folder.is_symlink():
                raise ConfigError(f"{name}: is a symbolic link, which may lead elsewhere tomorrow; give the folder it leads to")
            found = self.folder.stat()
        except FileNotFoundError:
            return
        except OSError as e:
            raise ConfigError(f"{name}: cannot be read ({e.strerror}); run as the user who serves") from None
        if found.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{name}: belongs to user {found.st_uid}; give a folder of your own, or run as the user who serves"
            )
        if found.st_mode & 0o022:
            raise ConfigError(f"{name}: others can write in it; chmod 700 it, or give another")

    def key(self) -> str | None:
        """Return the servers' key: TEPO_SERVER_KEY, or the content of the key file; None if there is neither.

        Raises ConfigError.
        """
        self.check()
        given = key_from_environment()
        if given is not None:
            return given
        path = self.folder / KEY_FILE
        try:
            found = path.lstat()
            key = _text(path).strip()
        except FileNotFoundError:
            return None
        except OSError as e:
            raise ConfigError(f"{path}: cannot read the servers' key ({e.strerror}); run as the user who serves") from None
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(f"{path}: others can read the servers' key; remove it and start the servers again")
        return checked_key(key, str(path))

    def make_key(self) -> str:
        """Return `key`, after making one if there is none. Processes that make one at the same time all get the same key."""
        if (known := self.key()) is not None:
            return known
        part = self._part(KEY_FILE, secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(part, self.folder / KEY_FILE)  # atomic: the file is complete when it appears, and never replaces another
        part.unlink()
        made = self.key()
        assert made is not None, "it was made above"
        return made

    def records(self) -> list[Record]:
        """Return the published servers, which are or were healthy, ordered by name.

        Raises:
            RolloutError: A file is not a record.
            ConfigError: See `check`.
        """
        self.check()
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                text = _read(path)
                if text is not None:  # else it was withdrawn meanwhile
                    found.append(Record(**json.loads(text)))
            except ConfigError:  # a ValueError too
                raise
            except (OSError, ValueError, TypeError) as e:
                raise RolloutError(
                    f"{path}: not the record of a server ({e}); remove it, or use one version of `tepo`"
                ) from None
        return found

    def publish(self, record: Record) -> None:
        """Publish a healthy server. Replaces the record of an earlier server at the same address."""
        self._clear(record)
        self._replace(f"{record.stem}.json", json.dumps(dataclasses.asdict(record), indent=2) + "\n")

    def withdraw(self, record: Record) -> None:
        """Remove the record of a server."""
        (self.folder / f"{record.stem}.json").unlink(missing_ok=True)
        self._clear(record)

    def take(self, record: Record, run: str) -> str | None:
        """Reserve a start for one run.

        Args:
            record: The start.
            run: Absolute path of the run.

        Returns:
            None on success, else the run that has reserved it already. Empty string: the start is over.
        """
        path = self._path(record, "taken")
        part = self._part(record.stem, f"{run}\n")
        try:
            os.link(part, path)
        except FileExistsError:
            return (_read(path) or "").strip()
        finally:
            part.unlink()
        return None if self._stands(record, path) else ""

    def end(self, record: Record, why: str) -> None:
        """Ask `tepo serve` to restart a server. Does nothing if the start is over already.

        Args:
            record: The start that has to end.
            why: Reason, which `ended` returns.
        """
        path = self._path(record, "end")
        if record in self.records():
            self._replace(path.name, why)
            self._stands(record, path)

    def ended(self, record: Record) -> str | None:
        """Return why a restart of this server was requested; None if it was not."""
        return _read(self._path(record, "end"))

    def register(self, keeper: str) -> None:
        """Register a `tepo serve` that begins. Removes what killed ones on this machine left behind."""
        for other, (machine, _) in self._registered().items():
            host, _, pid = other.rpartition("-")
            if host == this_host() and machine == _machine() and not Path("/proc", pid).exists():
                for record in self.records():
                    if record.keeper == other:
                        self.withdraw(record)
                self.deregister(other)
        if not self._registered():
            self._replace(_TURN, "{}")
        self.answer(keeper, "")

    def answer(self, keeper: str, token: str) -> None:
        """Acknowledge a lease for a `tepo serve`: it starts no server, and runs none except those that the lease keeps.

        Args:
            keeper: See `keeper_name`.
            token: Token of the lease. Empty string: none.
        """
        self._replace(f"{keeper}.{_KEEPER}", f"{_machine()} {token}")

    def deregister(self, keeper: str) -> None:
        """Unregister a `tepo serve` whose servers have ended. The last one also removes the lease."""
        (self.folder / f"{keeper}.{_KEEPER}").unlink(missing_ok=True)
        if not self._registered():
            (self.folder / _TURN).unlink(missing_ok=True)

    def answers(self) -> dict[str, str]:
        """Return keeper -> last acknowledged token of every registered `tepo serve`; empty string if it acknowledged none."""
        return {keeper: token for keeper, (_, token) in self._registered().items()}

    def _registered(self) -> dict[str, tuple[str, str]]:
        found = {path.stem: _read(path) for path in sorted(self.folder.glob(f"*.{_KEEPER}"))}
        return {keeper: (text.split(" ")[0], text.split(" ")[1]) for keeper, text in found.items() if text is not None}

    def take_turn(self, run: str, starts: Sequence[str]) -> DeviceLease:
        """Write a new device lease and return it.

        Args:
            run: Absolute path of the run that takes the devices.
            starts: Start ids of the run's own servers, which stay.
        """
        turn = DeviceLease(run, secrets.token_hex(8), tuple(starts))
        self._replace(_TURN, json.dumps(dataclasses.asdict(turn)))
        return turn

    def turn(self) -> DeviceLease | None:
        """Return the current device lease; None if no run has one."""
        text = _read(self.folder / _TURN)
        said = {} if text is None else json.loads(text)
        return DeviceLease(said["run"], said["token"], tuple(said["starts"])) if said.get("run") else None

    def end_turn(self, run: str) -> None:
        """End the lease of `run`, if it has one. The file stays: over NFS a new file is taken for missing for a long time."""
        if (turn := self.turn()) is not None and turn.run == run:
            self._replace(_TURN, "{}")

    def _path(self, record: Record, what: str) -> Path:
        return self.folder / f"{record.stem}.{record.start}.{what}"

    def _stands(self, record: Record, path: Path) -> bool:
        """Return whether the start is still published.

        If not, remove `path`: whoever withdrew the record may not have seen that file.
        """
        if record in self.records():
            return True
        path.unlink(missing_ok=True)
        return False

    def _clear(self, record: Record) -> None:
        for what in ("taken", "end"):
            for path in self.folder.glob(f"{record.stem}.*.{what}"):
                path.unlink(missing_ok=True)

    def _replace(self, name: str, text: str) -> None:
        """Write a file of mode 0600 atomically."""
        with replacing(self.folder / name, temporary=self._temporary(name)) as unfinished:
            _write_private(unfinished, text)

    def _part(self, name: str, text: str) -> Path:
        """Write a complete file of mode 0600 under a temporary name, to be linked, and return its path."""
        path = self._temporary(name)
        _write_private(path, text)
        sync(path)
        return path

    def _temporary(self, name: str) -> Path:
        """Return a path that no other process writes."""
        return self.folder / f".{name}.{secrets.token_hex(8)}"


def _write_private(path: Path, text: str) -> None:
    """Write a new file of mode 0600."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _machine() -> str:
    """Return the id of this PID namespace: process ids are valid on this host, or in this container on it."""
    return os.readlink("/proc/self/ns/pid")


def _read(path: Path) -> str | None:
    """Return the content of a file that other processes may replace; None if it does not exist."""
    for _ in range(_READS):
        try:
            return _text(path)
        except FileNotFoundError:
            return None
        except OSError as e:
            if e.errno != errno.ESTALE:  # replaced meanwhile, over NFS
                raise
    raise RolloutError(f"{path}: replaced {_READS} times while it was read; is its file system well?")


def _text(path: Path) -> str:
    """Return the content of a file that belongs to this user or root.

    The owner is checked per file: where others can rename folders above, their file may lie at this path for a moment.

    Raises ConfigError for a symbolic link or another user's file; OSError.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise ConfigError(f"{path}: is a symbolic link, which no part of a rendezvous is; remove it") from None
        raise
    with os.fdopen(opened) as file:
        owner = os.fstat(opened).st_uid
        if owner not in (os.geteuid(), 0):
            raise ConfigError(f"{path}: belongs to user {owner}, so it is not read; run as the user who serves")
        return file.read()


def key_from_environment() -> str | None:
    """Return the key in TEPO_SERVER_KEY; None if it is not set. Raises ConfigError for an unusable key."""
    given = os.environ.get(KEY_VARIABLE)
    return None if given is None else checked_key(given, KEY_VARIABLE)


def checked_key(key: str, source: str) -> str:
    """Return `key`. Raise ConfigError if an HTTP header cannot hold it or it could be guessed.

    Args:
        key: The servers' key.
        source: Where the key comes from, for the message.
    """
    if len(key) < SHORTEST_KEY or not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"{source}: the servers' key has {SHORTEST_KEY} printable characters at least, and no space; make a new one"
        )
    return key


def this_host() -> str:
    """Return the name by which other machines know this one."""
    return socket.gethostname()
