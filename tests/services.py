"""The rollout service as a fork of a test's process, for engines that exist in it alone."""

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from tepo_megatron.base.processes import die_with_parent
from tepo_megatron.config import Config
from tepo_megatron.dist.platform import activate
from tepo_megatron.service.messages import CONNECTION
from tepo_megatron.service.opening import EngineFactory
from tepo_megatron.service.service import serve
from tepo_megatron.trainer.service_client import ServiceAddress
from tepo_megatron.trainer.train import train


def fork(work: Callable[[], object]) -> int:
    """Run a function in a fork of this process, which ends with it; return its pid."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        die_with_parent(parent)
        torch.set_num_threads(torch.get_num_threads())  # renews the pool of the fork, before two threads do so at once
        work()
        status = 0
    except BaseException as e:
        sys.excepthook(type(e), e, e.__traceback__)
    os._exit(status)


class ForkedService:
    """In the place of the launcher: it starts a service, and connects one rank 0 after the other."""

    def __init__(self, make_engine: EngineFactory | None = None, before: Callable[[], object] = lambda: None) -> None:
        self._control, theirs = socket.socketpair()

        def work() -> None:
            self._control.close()
            before()
            serve(theirs, make_engine)

        with theirs:
            self.pid = fork(work)

    def connect(self) -> ServiceAddress:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
        return ServiceAddress(Connection(ours.detach()), self.pid)


def train_here(cfg: Config, make_engine: EngineFactory | None = None) -> None:
    """Train as this process's rank. Rank 0 forks a service, unless the environment names one."""
    alone = os.environ.get("RANK", "0") == "0" and CONNECTION not in os.environ
    train(cfg, activate("cpu"), ForkedService(make_engine).connect() if alone else None)
