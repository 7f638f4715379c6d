"""A folder in which servers say where they are, and trainers which of them they use. All machines of a run see it.

    key                       what every server asks for, unless TEPO_SERVER_KEY says it
    HOST-PORT.json            a healthy server, as a `Record`
    HOST-PORT.START.taken     the run that uses this start of it
    HOST-PORT.START.end       why this start is over, as whoever used it says: it has to be started again
    HOST-PID.keeper           a `tepo serve`, and its last answer
    turn                      the run that has the servers' devices (`standstill.py`), the starts that may be there, and a token
                              for the answers

Every file appears under its name when it is complete, and the folder is its owner's alone: whoever could write a record would
be sent the key.
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

KEY_VARIABLE = "TEPO_SERVER_KEY"
KEY_FILE = "key"
SHORTEST_KEY = 16  # characters
_TURN, _KEEPER = "turn", "keeper"
_READS = 5


@dataclass(frozen=True)
class Record:
    """What a served engine says of itself, once it is healthy; a new one for each start.

    run: the name in its config; model: `fingerprint` of what it loaded; start: unlike that of every other start; host, pid: of
    the `tepo serve` that keeps it; log: its path there; sleeps: it was started so that it can.
    """

    engine: str
    engine_version: str
    url: str
    run: str
    tp: int
    model: str
    max_model_len: int
    precision: str
    host: str
    pid: int
    start: str
    log: str
    sleeps: bool = False

    @property
    def stem(self) -> str:
        """HOST-PORT: no two servers that live have one."""
        return f"{self.host}-{self.url.rpartition(':')[2]}"

    @property
    def keeper(self) -> str:
        """HOST-PID of the `tepo serve` that keeps it."""
        return keeper_name(self.host, self.pid)

    @property
    def where(self) -> str:
        """In messages."""
        return f"{self.url} (of pid {self.pid} on {self.host}, log {self.log})"


@dataclass(frozen=True)
class Turn:
    """starts: of servers that `run` keeps, and has put to sleep or is about to."""

    run: str
    token: str
    starts: tuple[str, ...]


def keeper_name(host: str, pid: int) -> str:
    """Of a `tepo serve`."""
    return f"{host}-{pid}"


def fingerprint(model: Path) -> str:
    """SHA-256 of the model's config.json. Raises ConfigError."""
    try:
        return sha256((model / "config.json").read_bytes()).hexdigest()
    except OSError as e:
        raise ConfigError(
            f"model.path={model}: cannot read config.json ({e.strerror}); give a Hugging Face directory"
        ) from None


class Rendezvous:
    """The folder, as both sides use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self) -> None:
        """Make the folder if there is none. Raises ConfigError where others could put records into it."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"rollout.server.rendezvous={self.folder}: cannot be made ({e.strerror}); give another") from None
        self.check()

    def check(self) -> None:
        """Raise ConfigError unless this user, or root, alone decides what lies in the folder.

        Both sides ask before they read anything of it: whoever writes a record is sent the key and the weights. A folder that
        is not there yet passes.
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
        """What the servers ask for: TEPO_SERVER_KEY, or what the folder says; None while that says nothing."""
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
        """`key`, after making one if there is none: of several that make one at once all get the same."""
        if (known := self.key()) is not None:
            return known
        part = self._part(KEY_FILE, secrets.token_urlsafe(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(part, self.folder / KEY_FILE)  # complete, or not there; never in the place of another
        part.unlink()
        made = self.key()
        assert made is not None, "it was made above"
        return made

    def records(self) -> list[Record]:
        """The servers that are or were healthy, ordered by name. Raises RolloutError for a file that is no record.

        Raises ConfigError as `check` does.
        """
        self.check()
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                text = _read(path)
                if text is not None:  # else withdrawn meanwhile
                    found.append(Record(**json.loads(text)))
            except ConfigError:  # a ValueError too
                raise
            except (OSError, ValueError, TypeError) as e:
                raise RolloutError(
                    f"{path}: not the record of a server ({e}); remove it, or use one version of `tepo`"
                ) from None
        return found

    def publish(self, record: Record) -> None:
        """Say that a server is healthy, in the place of what was said of an earlier one at the same address."""
        self._clear(record)
        part = self._part(record.stem, json.dumps(dataclasses.asdict(record), indent=2) + "\n")
        part.rename(self.folder / f"{record.stem}.json")

    def withdraw(self, record: Record) -> None:
        """Say no more of it."""
        (self.folder / f"{record.stem}.json").unlink(missing_ok=True)
        self._clear(record)

    def take(self, record: Record, run: str) -> str | None:
        """Have a start for `run` alone. Returns None, or the run that has it already; empty: that start is over."""
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
        """Ask for another start of it, unless it is over already."""
        path = self._path(record, "end")
        if record in self.records():
            self._part(record.stem, why).rename(path)
            self._stands(record, path)

    def ended(self, record: Record) -> str | None:
        """Why another start was asked for; None if it was not."""
        return _read(self._path(record, "end"))

    def register(self, keeper: str) -> None:
        """A `tepo serve` begins; what killed ones of this machine left behind is removed."""
        for other, (machine, _) in self._registered().items():
            host, _, pid = other.rpartition("-")
            if host == this_host() and machine == _machine() and not Path("/proc", pid).exists():
                for record in self.records():
                    if record.keeper == other:
                        self.withdraw(record)
                self.deregister(other)
        if not self._registered():
            self._part(_TURN, "{}").rename(self.folder / _TURN)
        self.answer(keeper, "")

    def answer(self, keeper: str, token: str) -> None:
        """Of a `tepo serve`: it starts nothing, and nothing is there but what the turn with this token keeps."""
        self._part(keeper, f"{_machine()} {token}").rename(self.folder / f"{keeper}.{_KEEPER}")

    def deregister(self, keeper: str) -> None:
        """It has ended, and its servers before it; with the last one a turn ends."""
        (self.folder / f"{keeper}.{_KEEPER}").unlink(missing_ok=True)
        if not self._registered():
            (self.folder / _TURN).unlink(missing_ok=True)

    def answers(self) -> dict[str, str]:
        """The last one of every `tepo serve`; empty for one that gave none."""
        return {keeper: token for keeper, (_, token) in self._registered().items()}

    def _registered(self) -> dict[str, tuple[str, str]]:
        found = {path.stem: _read(path) for path in sorted(self.folder.glob(f"*.{_KEEPER}"))}
        return {keeper: (text.split(" ")[0], text.split(" ")[1]) for keeper, text in found.items() if text is not None}

    def take_turn(self, run: str, starts: Sequence[str]) -> Turn:
        """Have only these starts, of `run`, be there from now on."""
        turn = Turn(run, secrets.token_hex(8), tuple(starts))
        self._part(_TURN, json.dumps(dataclasses.asdict(turn))).rename(self.folder / _TURN)
        return turn

    def turn(self) -> Turn | None:
        """The one that a run has."""
        text = _read(self.folder / _TURN)
        said = {} if text is None else json.loads(text)
        return Turn(said["run"], said["token"], tuple(said["starts"])) if said.get("run") else None

    def end_turn(self, run: str) -> None:
        """The turn of `run` is over, if it has one. The file stays: over NFS one that comes anew is long taken for missing."""
        if (turn := self.turn()) is not None and turn.run == run:
            self._part(_TURN, "{}").rename(self.folder / _TURN)

    def _path(self, record: Record, what: str) -> Path:
        return self.folder / f"{record.stem}.{record.start}.{what}"

    def _stands(self, record: Record, path: Path) -> bool:
        """Whether a server still has the start of which `path` says something; if not, whoever withdrew it may not have seen
        that, and it is removed.
        """
        if record in self.records():
            return True
        path.unlink(missing_ok=True)
        return False

    def _clear(self, record: Record) -> None:
        for what in ("taken", "end"):
            for path in self.folder.glob(f"{record.stem}.*.{what}"):
                path.unlink(missing_ok=True)

    def _part(self, name: str, text: str) -> Path:
        """A complete file of its owner's, under a name that nobody looks for."""
        path = self.folder / f".{name}.{secrets.token_hex(8)}"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return path


def _machine() -> str:
    """Where process ids mean what they mean here: this host, or a container's part of it."""
    return os.readlink("/proc/self/ns/pid")


def _read(path: Path) -> str | None:
    """What a file says that others replace; None: it is not there."""
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
    """What a file of this user's, or of root's, says: where others may rename folders above, theirs may lie there for a moment.

    Raises ConfigError for a link, or for another's; OSError.
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
    """TEPO_SERVER_KEY; None where it is not set."""
    given = os.environ.get(KEY_VARIABLE)
    return None if given is None else checked_key(given, KEY_VARIABLE)


def checked_key(key: str, source: str) -> str:
    """Raise ConfigError for a key that a header cannot hold, or that could be guessed."""
    if len(key) < SHORTEST_KEY or not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(
            f"{source}: the servers' key has {SHORTEST_KEY} printable characters at least, and no space; make a new one"
        )
    return key


def this_host() -> str:
    """What the other machines call this one."""
    return socket.gethostname()
