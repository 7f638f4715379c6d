"""Collect the facts of one machine for a node check, and take its part in the network tests. See launch/node_check.py.

`python node_facts.py ADDRESS PORT RANK WORLD GPUS` is one rank of the all-reduce.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # last, because profile.py in this folder would hide Python's own, which PyTorch imports
    sys.path.append(sys.path.pop(0))

# Oldest driver of a CUDA release. The newest entry holds for later releases too.
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_VERSIONS = """
import json, torch
works = torch.cuda.is_available()
cudnn = torch.backends.cudnn.version() if works else None
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": cudnn, "works": works}))
"""
# Limit since a call of nvidia-smi: eight GPUs without persistence mode take half a minute; then the machine is left out
_SMI_SECONDS = 120
# Limit since an import of PyTorch: it takes 10 minutes over a cold file system; then the machine is left out; key
# node_check.timeout_seconds; a start
_IMPORT_SECONDS = 1200
# Limit since the last greeting: longer than any check; then the listener ends; key node_check.timeout_seconds
_LISTEN_SECONDS = 7200
_GREETING_SECONDS = 2  # limit since a connection: a greeting is one packet; then the connection is closed
_ROUNDS, _GPU_NUMEL, _CPU_NUMEL = 5, 64 * 2**20, 2**20  # all-reduces after the first, and their fp32 elements


def gather(gpus: int, interfaces: list[str], skip: list[str], infiniband: str = "") -> dict[str, Any]:
    """Return the facts of this machine, with its faults and a line about it."""
    faults = adapter_faults(infiniband)
    there = addresses()
    said = [f"{len(os.sched_getaffinity(0))} CPUs", f"interfaces {', '.join(f'{n} {a}' for n, a in there) or 'none'}"]
    for name in interfaces:
        if name not in dict(there):
            have = ", ".join(n for n, _ in there) or "none"
            faults.append(f"has no interface {name} with an address (it has {have}); correct network.interface, or set null")
    versions: dict[str, Any] = {}
    if "all_reduce" not in skip or (gpus and not {"driver", "cudnn"} <= set(skip)):
        versions, fault = _versions()
        faults += [fault] if fault else []
        said.append(", ".join(f"{name} {version}" for name, version in versions.items() if name != "works" and version))
    if gpus:
        found, driver, fault = _nvidia_smi()
        said.append(f"{found} GPUs, driver {driver or 'unknown'}")
        if "gpus" not in skip and (fault or found < gpus):
            faults.append(fault or f"has {found} GPUs, and gpus_per_node is {gpus}; drain it, or correct gpus_per_node")
        elif "driver" not in skip and (why := driver_fault(driver, versions)):
            faults.append(why)
        if versions.get("works") and not versions.get("cudnn") and "cudnn" not in skip:
            faults.append("PyTorch finds no cuDNN; install the wheel that requirements/ pins, or use the image")
    compared = {name: versions.get(name) for name in ("torch", "cuda", "cudnn")}
    return {"faults": faults, "said": "; ".join(said), "versions": json.dumps(compared)}


def adapter_faults(wanted: str, folder: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Return why NCCL would not find its RDMA adapters, and would use TCP without a word.

    `wanted`: NCCL_IB_HCA: prefixes of names, or after "=" whole names, perhaps with ports; after "^" what is left out.
    """
    there = sorted(path.name for path in folder.glob("*"))
    names = [name.partition(":")[0] for name in wanted.lstrip("=").split(",") if name and not wanted.startswith("^")]
    exact = wanted.startswith("=")
    missing = [name for name in names if not any(found == name if exact else found.startswith(name) for found in there)]
    have = ", ".join(there) or "none"
    return [f"has no RDMA adapter {name} (it has {have}); correct network.infiniband, or set null" for name in missing]


def driver_fault(driver: str | None, versions: dict[str, Any]) -> str | None:
    """Return why a driver is too old for PyTorch's CUDA; None if it is not, or cuda-compat makes up for it."""
    cuda = versions.get("cuda")
    if not cuda or not driver or not (major := re.match(r"\d+", driver)):
        return None
    release = int(cuda.split(".")[0])
    oldest = _OLDEST_DRIVER.get(release, max(_OLDEST_DRIVER.values()) if release > max(_OLDEST_DRIVER) else 0)
    if int(major[0]) < oldest and not versions.get("works"):
        return (
            f"driver {driver} is too old for CUDA {cuda}, which needs release {oldest} or newer; update it, or install "
            f"cuda-compat-{cuda.replace('.', '-')} in the image"
        )
    if not versions.get("works"):
        return f"PyTorch with CUDA {cuda} cannot use the GPUs (driver {driver}); run `nvidia-smi` and `dmesg` there"
    return None


def differing(facts: dict[str, Any], names: list[str]) -> list[str]:
    """Return the machines whose versions differ from those of the most machines."""
    count = Counter(facts[name]["versions"] for name in names)
    usual = count.most_common(1)[0][0] if count else None
    return [name for name in names if facts[name]["versions"] != usual]


def addresses() -> list[tuple[str, str]]:
    """Return (interface, IPv4 address) of this machine without loopback addresses, those of containers' bridges last."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                address = socket.inet_ntoa(answer[20:24])
                if not address.startswith("127."):
                    found.append((name, address))
    return sorted(found, key=lambda pair: bool(re.match(r"docker|br-|virbr|veth|cni|podman", pair[0]) and len(found) > 1))


def interface_of(address: str) -> str | None:
    """Return the interface with this address; None if there is none."""
    return next((name for name, own in addresses() if own == address), None)


class Listener:
    """The head's port while the machines look for it: it answers each greeting with its time. `fault`: why there is no port."""

    def __init__(self, port: int, token: str, interfaces: list[str]) -> None:
        found = addresses()
        self.addresses = [pair for pair in found if pair[0] in interfaces] if interfaces else found
        self.port, self.fault, self._token = port, "", token.encode()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.port = port or free_port()  # the port, which stays reserved until the listener is closed
            self._socket.bind(("", self.port))
            self._socket.listen(512)
            self._socket.settimeout(_LISTEN_SECONDS)
            threading.Thread(target=self._serve, daemon=True).start()
        except OSError as e:
            self.fault = (
                f"port {port} cannot be used ({e.strerror}); set network.port to another one, or to null for a free one"
            )

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._socket.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(_GREETING_SECONDS)
                    if connection.recv(64) == self._token:
                        connection.sendall(repr(time.time()).encode())
                        connection.recv(1)  # the other side closes first, and this port is not left in TIME_WAIT


def free_port() -> int:
    """Return a port that nobody listens on, outside of the range from which the kernel gives ports to connections."""
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        ports = [port for port in range(20_000, 60_000) if not low <= port <= high]
        for port in random.SystemRandom().sample(ports, min(50, len(ports))):
            with socket.socket() as s, contextlib.suppress(OSError):
                s.bind(("", port))
                return port
    with socket.socket() as s:
        s.bind(("", 0))
        return int(s.getsockname()[1])


def greet(address: str, port: int, token: str, seconds: float) -> tuple[str, float]:
    """Greet the head. Return the own address towards it, and how far this machine's clock is ahead in seconds."""
    with socket.create_connection((address, port), timeout=seconds) as s:
        before = time.time()
        s.sendall(token.encode())
        answer = s.recv(64)
        after = time.time()
        if not answer:
            raise ConnectionError("another program answers there")
        return s.getsockname()[0], (before + after) / 2 - float(answer)


def _nvidia_smi() -> tuple[int, str | None, str | None]:
    """Return the number of GPUs, the driver's version, and why there are none."""
    if shutil.which("nvidia-smi") is None:
        return 0, None, "has no nvidia-smi, and the job needs GPUs; use a GPU partition, or a container runtime with GPUs"
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return 0, None, f"nvidia-smi does not answer within {_SMI_SECONDS} s; reboot the machine"
    lines = done.stdout.split()
    if done.returncode or not lines:
        return 0, None, f"nvidia-smi fails: {(done.stdout + done.stderr).strip().splitlines()[-1:]}; run it there, and drain it"
    return len(lines), lines[0], None


def _versions() -> tuple[dict[str, Any], str | None]:
    """Return the versions of PyTorch, CUDA and cuDNN, and why PyTorch cannot be imported."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _VERSIONS], capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"{sys.executable} did not import PyTorch within {_IMPORT_SECONDS} s; look at the file system that it is on"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), None
    why = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {}, f"{sys.executable} cannot import PyTorch ({why}); correct python or container.image of the profile"


def all_reduce(address: str, port: int, rank: int, world: int, gpus: int) -> float:
    """Take part in an all-reduce as one rank. Return the bus bandwidth in GB/s, 2 (n - 1) / n of the tensor per time."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    where = f"tcp://{address}:{port}"
    dist.init_process_group("nccl" if gpus else "gloo", where, timedelta(seconds=_IMPORT_SECONDS), world, rank)
    numel, best = _GPU_NUMEL if gpus else _CPU_NUMEL, float("inf")
    x = torch.ones(numel, device=device)
    for _ in range(_ROUNDS + 1):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        float(x[0])  # on a GPU this waits for the result
        best = min(best, time.perf_counter() - start)
    expected = float(world) ** (_ROUNDS + 1)
    if abs(float(x[0]) - expected) > 1e-5 * expected:
        raise ArithmeticError(f"the all-reduce gave {float(x[0])}, not {expected}")
    dist.destroy_process_group()
    return 4 * numel * 2 * (world - 1) / world / best / 1e9


if __name__ == "__main__":
    where, *numbers = sys.argv[1:]
    print(all_reduce(where, *map(int, numbers)))
