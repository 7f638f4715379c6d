"""A server behind an endpoint: how it is started, reached and ended, wherever it runs."""

from dataclasses import dataclass
from typing import Protocol

from tepo_megatron.base.errors import RolloutError


@dataclass(frozen=True)
class ServerAddress:
    """URL of a server, and the key that it requires."""

    url: str
    key: str


class Server(Protocol):
    """Server behind an endpoint: a process of this machine (`servers/local.py`) or one of others (`servers/remote.py`)."""

    name: str
    restart_note: str

    def launch(self) -> None:
        """Start the server, the first time and after each `end`. Returns at once. Raises RolloutError, ConfigError."""

    async def wait_ready(self) -> ServerAddress:
        """Return the address once the server takes requests.

        Raises RolloutError if it fails, ConfigError if it does not fit the run.
        """

    async def failure(self, what: str) -> RolloutError:
        """Return an error that says `what` the server did, and where to look."""

    @property
    def running(self) -> bool:
        """Return whether the server is alive, as far as this is known without a request."""

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the server's processes on this machine, in bytes."""

    async def end(self) -> None:
        """End this start of the server at once. The next start serves its first weights."""

    def stop(self) -> None:
        """Release the server at the end of the run; bounded in time.

        May be called again, before `launch`, and from any thread.
        """

    def forget(self) -> None:
        """Remove the files that were made for the server."""
