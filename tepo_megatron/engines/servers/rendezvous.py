"""A folder in which servers publish their addresses, and trainers mark the servers that they use. All machines of a run see it.

    key                       the key that every server requires, unless TEPO_SERVER_KEY gives it
    HOST-PORT.json            a healthy server, as a `ServerRecord`
    HOST-PORT.START.taken     the run that uses this start (incarnation) of the server
    HOST-PORT.START.end       why its user ended this start: the server has to be restarted
    HOST-PID.service          a running `tepo serve`, and the last lease token that it acknowledged
    lease                     the device lease (`lease.py`): the run that has the servers' devices, the starts that it
                              keeps, and a token for the acknowledgements

Every file appears under its name only when it is complete. The folder belongs to its owner alone: whoever could write a record
would be sent the key.
"""

import dataclasses
import json
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tepo_megatron.base.errors import ConfigError, RolloutError
from tepo_megatron.engines.servers.lease import DeviceLeases, service_name
from tepo_megatron.engines.servers.server_key import make_key, read_key
from tepo_megatron.engines.servers.shared_folder import check_owner, read_file, replace_private, write_part


@dataclass(frozen=True)
class ServerRecord:
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
    def service(self) -> str:
        """HOST-PID of the `tepo serve` that runs the server."""
        return service_name(self.host, self.pid)

    @property
    def where(self) -> str:
        """Address of the server for messages, with its pid, host and log."""
        return f"{self.url} (of pid {self.pid} on {self.host}, log {self.log})"


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
        self.folder, self.leases = folder, DeviceLeases(folder)

    def create(self) -> None:
        """Make the folder if it is missing. Raises ConfigError if others could put records into it."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"rollout.server.rendezvous={self.folder}: cannot be made ({e.strerror}); give another") from None
        self.check()

    def check(self) -> None:
        """Raise ConfigError unless only this user or root can change the folder. A folder that does not exist passes."""
        check_owner(self.folder)

    def key(self) -> str | None:
        """Return the servers' key, None if there is none. See `server_key.read_key`."""
        return read_key(self.folder)

    def make_key(self) -> str:
        """Return the servers' key, which is made if there is none. See `server_key.make_key`."""
        return make_key(self.folder)

    def clear_killed(self) -> None:
        """Remove what killed `tepo serve` processes of this machine left behind."""
        for service in self.leases.killed():
            for record in self.records():
                if record.service == service:
                    self.withdraw(record)
            self.leases.deregister(service)

    def records(self) -> list[ServerRecord]:
        """Return the published servers, which are or were healthy, ordered by name."""
        self.check()
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                if (text := read_file(path)) is not None:  # else it was withdrawn meanwhile
                    found.append(ServerRecord(**json.loads(text)))
            except ConfigError:  # a ValueError too
                raise
            except (OSError, ValueError, TypeError) as e:
                raise RolloutError(
                    f"{path}: not the record of a server ({e}); remove it, or use one version of `tepo`"
                ) from None
        return found

    def publish(self, record: ServerRecord) -> None:
        """Publish a healthy server. Replaces the record of an earlier server at the same address."""
        self._clear(record)
        replace_private(self.folder / f"{record.stem}.json", json.dumps(dataclasses.asdict(record), indent=2) + "\n")

    def withdraw(self, record: ServerRecord) -> None:
        """Remove the record of a server."""
        (self.folder / f"{record.stem}.json").unlink(missing_ok=True)
        self._clear(record)

    def claim(self, record: ServerRecord, run: str) -> str | None:
        """Reserve a start for one run.

        Returns None on success, else the run that has reserved it already. Empty string: the start is over.
        """
        path = self._path(record, "taken")
        part = write_part(self.folder, record.stem, f"{run}\n")
        try:
            os.link(part, path)
        except FileExistsError:
            return (read_file(path) or "").strip()
        finally:
            part.unlink()
        return None if self._check_published(record, path) else ""

    def request_end(self, record: ServerRecord, why: str) -> None:
        """Ask `tepo serve` to restart a server. Does nothing if the start is over already."""
        path = self._path(record, "end")
        if record in self.records():
            replace_private(path, why)
            self._check_published(record, path)

    def end_reason(self, record: ServerRecord) -> str | None:
        """Return why a restart of this server was requested; None if it was not."""
        return read_file(self._path(record, "end"))

    def _path(self, record: ServerRecord, what: str) -> Path:
        return self.folder / f"{record.stem}.{record.start}.{what}"

    def _check_published(self, record: ServerRecord, path: Path) -> bool:
        """Return whether the start is still published.

        If not, remove `path`: whoever withdrew the record may not have seen that file.
        """
        if record in self.records():
            return True
        path.unlink(missing_ok=True)
        return False

    def _clear(self, record: ServerRecord) -> None:
        for what in ("taken", "end"):
            for path in self.folder.glob(f"{record.stem}.*.{what}"):
                path.unlink(missing_ok=True)
