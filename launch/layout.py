"""Determine how many machines a run takes, and what runs on which."""

from __future__ import annotations

from dataclasses import dataclass

from launch.profile import Cluster
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import Config


@dataclass(frozen=True)
class Layout:
    """The machines of a run."""

    train_nodes: int  # machines with training ranks, the first ones
    ranks: int
    # Machines with inference servers, after the training machines. 0: the run's first rank starts its servers on its own
    # machine.
    serve_nodes: int = 0
    servers: int = 0
    shared: bool = False  # True: the serving machines are the training machines (colocated)

    @property
    def nodes(self) -> int:
        """Return the number of machines."""
        return self.train_nodes + (0 if self.shared else self.serve_nodes)


def lay_out(cfg: Config, cluster: Cluster) -> Layout:
    """Return the layout of a run. Raise ConfigError if ranks or servers do not fill machines.

    With `rollout.server.rendezvous` servers have machines of their own, or under `rollout.colocate` the ranks' machines.
    """
    if cfg.platform == "cuda" and not cluster.gpus:
        raise ConfigError(
            "platform=cuda, and the cluster's machines have no GPUs; set gpus_per_node in its profile, or ranks_per_node to "
            "their number where the scheduler knows no GPUs"
        )
    world = cfg.parallel.world_size
    train_nodes, ranks = _split(world, cluster.slots, f"parallel has {world} ranks", "dp, tp, pp or cp")
    server = cfg.rollout.server
    if server.rendezvous_folder is None:
        if train_nodes > 1 and not server.others and cfg.rollout.replay is None:
            raise ConfigError(
                f"parallel has {world} ranks, on {train_nodes} machines of {cluster.slots}, and all servers would be on one of "
                "them; with --rollout.server.rendezvous FOLDER they are on each of these machines (--rollout.colocate true), "
                "or with --sync.transport.folder FOLDER on machines of their own (--rollout.colocate false)"
            )
        starts = not server.others and cfg.rollout.replay is None
        taken = world + cfg.rollout.servers * server.tp
        if starts and not cfg.rollout.colocate and cfg.platform == "cuda" and taken > cluster.gpus:
            raise ConfigError(
                f"{world} ranks and rollout.servers={cfg.rollout.servers} of rollout.server.tp={server.tp} take {taken} GPUs, "
                f"and a machine has {cluster.gpus}; let them take turns (--rollout.colocate true), or give servers "
                "machines of their own with --rollout.server.rendezvous FOLDER"
            )
        return Layout(train_nodes, ranks)
    slots = None if cluster.slots is None else cluster.slots // server.tp
    if slots == 0:
        raise ConfigError(
            f"rollout.server.tp={server.tp} exceeds the {cluster.slots} GPUs of a machine; lower it to that at most"
        )
    if cfg.rollout.colocate:
        servers, left = divmod(cfg.rollout.servers, train_nodes)
        if left or (slots is not None and servers > slots):
            raise ConfigError(
                f"rollout.servers={cfg.rollout.servers} of {server.tp} GPUs cannot be spread evenly over the {train_nodes} "
                f"machines of the ranks, at most {slots} on each; make it a multiple of {train_nodes}"
            )
        return Layout(train_nodes, ranks, train_nodes, servers, shared=True)
    serve_nodes, servers = _split(
        cfg.rollout.servers, slots, f"rollout.servers={cfg.rollout.servers} of {server.tp} GPUs", "rollout.servers"
    )
    return Layout(train_nodes, ranks, serve_nodes, servers)


def _split(count: int, slots: int | None, what: str, keys: str) -> tuple[int, int]:
    """Return (machines, count on each), all alike. Raise ConfigError if the count does not divide evenly."""
    if slots is None or count <= slots:
        return 1, count
    if count % slots:
        raise ConfigError(f"{what}: on machines of {slots} some would stay empty; make it a multiple of {slots}, by {keys}")
    return count // slots, slots
