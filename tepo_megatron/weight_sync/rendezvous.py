"""The rendezvous store of a trainer's ranks and its servers, on the trainer's side (see `rendezvous_store.py`)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tepo_megatron.distributed.rendezvous_store import FolderStore, KeyValueStore, address_towards, is_loopback, open_store
from tepo_megatron.utils.scratch import PrivateFolder
from tepo_megatron.weight_sync.stores import make_folder


@dataclass(frozen=True)
class OwnedStore:
    """A private folder if all participants are on this machine, otherwise a TCPStore on one of this machine's addresses."""

    store: KeyValueStore
    where: str
    port: int = 0
    owned: PrivateFolder | None = None

    @classmethod
    def open(cls, address: str) -> "OwnedStore":
        """Make the folder, or open the TCPStore's port."""
        if is_loopback(address):
            owned = PrivateFolder(*make_folder())
            return cls(FolderStore(owned.path), f"in {owned.path}", owned=owned)
        store = open_store(address)
        return cls(store, f"at {address}:{store.port}", store.port)

    @property
    def folder(self) -> str:
        """The folder's path, as in `GroupSpec`; "" for a TCPStore."""
        return "" if self.owned is None else str(self.owned.path)

    def close(self) -> None:
        """Remove the folder. A second call does nothing."""
        if self.owned is not None:
            self.owned.remove()


def own_address(hosts: Sequence[str]) -> str:
    """Return this machine's address as servers on `hosts` and ranks on other machines reach it; loopback if all are here."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        hosts = [*hosts, os.environ["MASTER_ADDR"]]  # rank 0's machine, by the name that the other machines use
    addresses = [address_towards(host) for host in hosts]
    return next((address for address in addresses if not address.startswith("127.")), addresses[0])
