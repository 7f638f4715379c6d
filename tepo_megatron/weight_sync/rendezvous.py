"""The rendezvous store of a trainer's ranks and its servers, on the trainer's side (see `rendezvous_store.py`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import torch.distributed as dist

from tepo_megatron.distributed.rendezvous_store import FolderStore, KeyValueStore, address_towards, is_loopback, open_store
from tepo_megatron.weight_sync.stores import make_folder


class OwnedStore:
    """A private folder if all participants are on this machine, otherwise a TCPStore on one of this machine's addresses.

    Attributes:
        store: The store itself.
        port: The TCPStore's port, as in `channel.Meeting`; 0 for a folder.
        folder: The folder's path, as in `channel.Meeting`; "" for a TCPStore.
        where: The store's location, for messages.

    Raises:
        OSError: No port can be opened at the address.
        ConfigError: The folder cannot be made.
    """

    def __init__(self, address: str) -> None:
        self.store: KeyValueStore
        self.port, self.folder = 0, ""
        self._in_use: int | None = None
        self.where = ""
        if is_loopback(address):
            folder, self._in_use = make_folder()
            self.store, self.folder, self.where = FolderStore(folder), str(folder), f"in {folder}"
        else:
            tcp: dist.TCPStore = open_store(address)
            self.store, self.port, self.where = tcp, tcp.port, f"at {address}:{tcp.port}"

    def close(self) -> None:
        """Remove the folder. A second call does nothing."""
        if self._in_use is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._in_use)
            self._in_use = None


def own_address(hosts: Sequence[str]) -> str:
    """Return this machine's address as servers on `hosts` and ranks on other machines reach it; loopback if all are here."""
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        hosts = [*hosts, os.environ["MASTER_ADDR"]]  # rank 0's machine, by the name that the other machines use
    addresses = [address_towards(host) for host in hosts]
    return next((address for address in addresses if not address.startswith("127.")), addresses[0])
