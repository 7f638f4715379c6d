"""The machines of a run. Each runs its own launcher; that of the first machine keeps the store in which all ranks meet."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from tepo_megatron.base.errors import ConfigError
from tepo_megatron.base.processes import START_ID


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, as one of them sees them. The options of `tepo train` have torchrun's names."""

    count: int = 1
    index: int = 0  # of this machine, from 0
    endpoint: str = ""  # HOST:PORT of the store, which the first machine's launcher keeps; unused on one machine
    # Unique name of this start of the run: ranks that are left of an earlier one do not meet those of this one
    start: str = "none"

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigError(f"--node-rank {self.index}: expected a number from 0 to --nnodes {self.count} minus 1")
        if self.count > 1 and not (self._address[0] and self._address[1].isdecimal()):
            raise ConfigError(f"--rdzv-endpoint {self.endpoint!r}: --nnodes {self.count} needs HOST:PORT of the first machine")

    @property
    def is_first(self) -> bool:
        """Return whether rank 0, the service and the run's lock are on this machine."""
        return self.index == 0

    @property
    def _address(self) -> tuple[str, str]:
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), port

    def ranks(self, world_size: int) -> range:
        """Return the ranks of this machine. Raises ConfigError if the machines cannot have equally many."""
        if world_size % self.count:
            raise ConfigError(
                f"parallel: tp*pp*cp*dp = {world_size} ranks are no multiple of --nnodes {self.count}; change parallel.dp or "
                "the number of machines"
            )
        here = world_size // self.count
        return range(self.index * here, (self.index + 1) * here)

    @property
    def environment(self) -> dict[str, str]:
        """The variables from which the ranks of several machines know their store."""
        host, port = self._address
        own_store = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # rank 0 shall not start it
        return {"MASTER_ADDR": host, "MASTER_PORT": port, START_ID: self.start} | own_store

    @contextlib.contextmanager
    def store(self) -> Iterator[None]:
        """Keep the store of the ranks inside the block, if this is the first of several machines. It outlives restarts."""
        if self.count == 1 or not self.is_first:
            yield
            return
        import torch.distributed as dist  # which no other launcher needs

        host, port = self._address
        try:
            kept = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
        except RuntimeError as e:
            raise ConfigError(f"--rdzv-endpoint {self.endpoint}: cannot listen there ({e}); choose another port") from None
        yield
        del kept


ONE_MACHINE = Nodes()


def refuse_torchrun() -> None:
    """Raise ConfigError if torchrun started this process, which starts the ranks itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "tepo starts the ranks of its machine itself; call it without torchrun, on each machine once: tepo train CONFIG "
            "--nnodes N --node-rank I --rdzv-endpoint HOST:PORT (docs/rollouts.md)"
        )
