"""Check the machines of a job before it starts: `python node_check.py --folder FOLDER --names N1 N2 ...` on each of them.

Launch puts a copy of this file next to the job's files. It needs the standard library, and PyTorch for the all-reduce and the
versions. The machines exchange small files in FOLDER, so FOLDER is the canary of the shared file system too. The first machine
collects what the others report. It writes `good` (the machines to use, one per line), `endpoint` (address and port of the head)
and a file NAME.sh of network variables for each machine; or `fault`, one line for each bad machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# last, because profile.py in this folder would hide Python's own, which PyTorch imports
sys.path.append(str(Path(__file__).absolute().parent))
sys.path.sort(key=lambda path: path == str(Path(__file__).absolute().parent))
import node_facts
from node_facts import free_port

_LOOK_SECONDS = 0.1
# Limit since a machine greets the head: a packet takes milliseconds; then the next address is tried; key
# node_check.timeout_seconds
_CONNECT_SECONDS = 5.0
# Limit since SIGKILL to an all-reduce: the driver frees GPUs in seconds; then the check goes on without its output
_KILLED_SECONDS = 10.0


@dataclass(frozen=True)
class NodeCheck:
    """The options of a check and the place of this machine in it."""

    folder: Path
    names: list[str]  # all machines of the job, in its order
    name: str
    need: int  # number of machines that the job uses
    gpus: int  # GPUs that each machine must have; 0: the check of GPUs and driver is left out
    interfaces: list[str]  # interfaces that `network.interface` names; empty: those towards the head are used
    infiniband: str  # `network.infiniband`; empty: RDMA adapters are not looked at
    port: int  # `network.port`; 0: a free one is chosen
    skip: list[str]
    least: float  # least bandwidth of the all-reduce in GB/s
    clock: float  # largest difference of clocks in seconds
    deadline: float  # `time.monotonic()` at which the check gives up
    timeout: int

    def write(self, kind: str, tree: Any) -> None:
        """Write this machine's file of a kind, for the others."""
        _replace(self.folder / f"{self.name}.{kind}.json", json.dumps(tree))

    def read(self, names: Iterable[str], kind: str, patience: float | None = None) -> dict[str, Any]:
        """Return machine -> content of its file of a kind, for the machines that wrote it in time."""
        found: dict[str, Any] = {}
        deadline = self.deadline if patience is None else min(self.deadline, time.monotonic() + patience)
        while True:
            there = set(os.listdir(self.folder))  # NFS looks again at a listed folder, not at a name that was missing
            for name in names:
                if name not in found and f"{name}.{kind}.json" in there:
                    found[name] = json.loads((self.folder / f"{name}.{kind}.json").read_text())
            if len(found) == len(set(names)) or time.monotonic() > deadline:
                return found
            time.sleep(_LOOK_SECONDS)


def run(check: NodeCheck) -> int:
    """Take part in the check. Return 0 if the job can start, else 1. The first machine's result is that of the check."""
    first = check.names[0] == check.name
    check.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check.write("facts", node_facts.gather(check.gpus, check.interfaces, check.skip, check.infiniband))
    if first:
        _choose_head(check)
    chosen = check.read([check.names[0]], "chosen").get(check.names[0])
    if chosen is None:
        return 0  # the first machine reports what is wrong
    head, candidates = chosen["head"], chosen["candidates"]
    if head is None or not (first or check.name in candidates):
        return int(first)
    with contextlib.ExitStack() as stack:
        if check.name == head:
            listener = stack.enter_context(node_facts.Listener(check.port, chosen["token"], check.interfaces))
            check.write(
                "head",
                {"addresses": listener.addresses, "port": listener.port, "fault": listener.fault} | {"store": free_port()},
            )
        place = check.read([head], "head").get(head)
        if check.name in candidates and place is not None and not place["fault"]:
            check.write("reach", _reach(place, chosen["token"]))
        if first:
            _judge_network(check, chosen, place)
        verdict = check.read([check.names[0]], "verdict").get(check.names[0])
    if verdict is None or verdict["faults"]:
        return _end(check, verdict, None) if first else 0
    if check.name in verdict["members"]:
        check.write("reduce", _all_reduce(check, verdict))
    return _end(check, verdict, check.read(verdict["members"], "reduce")) if first else 0


def _choose_head(check: NodeCheck) -> None:
    """Choose the machines without a fault of their own, the head among them, and report the others."""
    patience = check.timeout / 2  # the other half is for the machines that came
    facts = check.read(check.names, "facts", patience)
    faults = {
        name: [
            f"does not see {check.folder}, or did not start the check within {patience:.0f} s (half of "
            "node_check.timeout_seconds); look above for its error"
        ]
        for name in check.names
        if name not in facts
    } | {name: fact["faults"] for name, fact in facts.items() if fact["faults"]}
    candidates = [name for name in check.names if name not in faults]
    for name in node_facts.differing(facts, candidates):
        faults[name] = [f"has {facts[name]['versions']}, and most have other versions; use one image or environment for all"]
    candidates = [name for name in candidates if name not in faults]
    for name, fact in facts.items():
        print(f"node check: {name}: {fact['said']}", flush=True)
    if len(candidates) < check.need:
        _finish(check, faults, [])
        check.write("chosen", {"head": None, "candidates": []})
        return
    token = os.urandom(16).hex()
    _replace(check.folder / "bad.json", json.dumps(faults))
    check.write("chosen", {"head": candidates[0], "candidates": candidates, "token": token})


def _reach(place: dict[str, Any], token: str) -> dict[str, Any]:
    """Return the head's addresses that this machine reaches, its interface towards each, and how far its clock is ahead."""
    routes: dict[str, str | None] = {}
    offset = 0.0
    for _, address in place["addresses"]:
        try:
            own, offset = node_facts.greet(address, place["port"], token, _CONNECT_SECONDS)
        except OSError:
            continue
        routes[address] = node_facts.interface_of(own)
    return {"reached": routes, "offset": offset}


def _judge_network(check: NodeCheck, chosen: dict[str, Any], place: dict[str, Any] | None) -> None:
    """Choose the head's address that all reach, and the members; report the machines that do not reach it."""
    head, candidates = chosen["head"], chosen["candidates"]
    faults: dict[str, list[str]] = json.loads((check.folder / "bad.json").read_text())
    if place is None or place["fault"]:
        faults[head] = [place["fault"] if place else f"did not open a port within {check.timeout} s"]
        return _verdict(check, faults, [], None, place, {})
    reach = check.read(candidates, "reach", _CONNECT_SECONDS * (len(place["addresses"]) + 1) + 10)
    addresses = [address for _, address in place["addresses"]]
    counts = {address: sum(address in found["reached"] for found in reach.values()) for address in addresses}
    address = max(addresses, key=lambda address: counts[address], default=None)
    tried = ", ".join(f"{interface} {address}" for interface, address in place["addresses"])
    if check.need == 1:  # the head is the whole job: nobody has to reach it
        address = address or head
    elif address is None or (len(candidates) > 1 and counts[address] <= 1):
        why = f"no other machine reaches it at {tried or 'any address'}; check its firewall, or set network.interface"
        faults[head] = [why]
        return _verdict(check, faults, [], None, place, {})
    for name in candidates if check.need > 1 else []:
        found = reach.get(name)
        if found is None or address not in found["reached"]:
            faults[name] = [f"does not reach the head {head} at {address} (port {place['port']}); check routes and firewalls"]
        elif "clock" not in check.skip and abs(found["offset"]) > check.clock:
            faults[name] = [
                f"its clock is {found['offset']:+.1f} s from {head}'s, and node_check.max_clock_seconds={check.clock:g}; "
                "synchronize it (chrony, ntpd)"
            ]
    good = [name for name in candidates if name not in faults][: check.need]
    towards = {name: reach.get(name, {"reached": {}})["reached"].get(address) for name in good}
    interfaces = {name: check.interfaces or [towards[name] or "lo"] for name in good}
    _verdict(check, faults, good, address, place, interfaces)


def _verdict(
    check: NodeCheck, faults: dict[str, list[str]], members: list[str], address: str | None, place: Any, interfaces: Any
) -> None:
    ports = {key: None if place is None else place[key] for key in ("port", "store")}
    tree = {"address": address, "interfaces": interfaces, "bad": faults, **ports}
    check.write("verdict", tree | {"members": members, "faults": len(members) < check.need})


def _all_reduce(check: NodeCheck, verdict: dict[str, Any]) -> dict[str, Any]:
    """Take part in an all-reduce over all GPUs, or one process per machine without them. Return speed and error."""
    per_node, members = check.gpus or 1, verdict["members"]
    world = per_node * len(members)
    if "all_reduce" in check.skip or world == 1:
        return {"speed": None, "error": ""}
    names = verdict["interfaces"][check.name]
    env = os.environ | {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": f"={','.join(names)}"}
    env |= {"OMP_NUM_THREADS": "1"}
    first, seconds = members.index(check.name) * per_node, max(10.0, check.deadline - time.monotonic())
    program = str(Path(__file__).with_name("node_facts.py"))
    pipe = subprocess.PIPE
    children = [
        subprocess.Popen(
            [sys.executable, program, verdict["address"], *map(str, (verdict["store"], first + i, world, check.gpus))],
            env=env | {"LOCAL_RANK": str(i)}, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True,
        )
        for i in range(per_node)
    ]  # fmt: skip
    speeds, error, end = [], "", time.monotonic() + seconds
    for child in children:
        try:
            out, said = child.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the driver keeps it
                child.communicate(timeout=_KILLED_SECONDS)
            error = error or f"the all-reduce did not end within {seconds:.0f} s; raise node_check.timeout_seconds"
            continue
        if child.returncode == 0:
            speeds.append(float(out.split()[-1]))
        else:
            error = error or (said.strip().splitlines() or [f"status {child.returncode}"])[-1]
    return {"speed": min(speeds, default=None), "error": error}


def _end(check: NodeCheck, verdict: dict[str, Any] | None, reduced: dict[str, Any] | None) -> int:
    """Write the result of the whole check. Return 0 if the job can start, else 1."""
    if verdict is None or reduced is None:
        return _finish(check, {} if verdict is None else verdict["bad"], [])
    members, faults = verdict["members"], dict(verdict["bad"])
    wrong = {name: f"the all-reduce failed: {reduced[name]['error']}" for name in reduced if reduced[name]["error"]}
    wrong |= {name: "did not report the all-reduce" for name in members if name not in reduced}
    speeds = [tree["speed"] for tree in reduced.values() if tree["speed"] is not None]
    if speeds and not wrong:
        slowest = min(speeds)
        size = f"{len(members)} machines x {check.gpus or 1}"
        print(f"node check: all-reduce over {size}: {slowest:.3g} GB/s of bus bandwidth", flush=True)
        if slowest < check.least:
            slow = min(members, key=lambda name: reduced[name]["speed"])
            least = f"node_check.min_gb_per_second={check.least:g}"
            wrong[slow] = f"the all-reduce over {size} reaches {slowest:.3g} GB/s, and {least}; compare pairs of machines"
    if wrong:
        return _finish(check, faults | {name: [why] for name, why in wrong.items()}, [])
    for name in members:
        names = verdict["interfaces"][name]
        lines = f"export GLOO_SOCKET_IFNAME={names[0]}\nexport NCCL_SOCKET_IFNAME=={','.join(names)}\n"
        _replace(check.folder / f"{name}.sh", lines)
    _replace(check.folder / "endpoint", f"{verdict['address']} {verdict['port']}\n")
    return _finish(check, faults, members)


def _finish(check: NodeCheck, faults: dict[str, list[str]], members: list[str]) -> int:
    """Write `good` or `fault`, and remove the machines' reports after a success."""
    lines = [f"{name}: {why}" for name, reasons in faults.items() for why in reasons]
    for line in lines:
        print(f"node check: {'left out: ' if members else ''}{line}", flush=True)
    if not members:
        lines.append(f"{len(check.names) - len(faults)} of {len(check.names)} machines are good, and {check.need} are needed")
        _replace(check.folder / "fault", "\n".join(lines) + "\n")
        return 1
    _replace(check.folder / "good", "\n".join(members) + "\n")
    print(f"node check: good: {', '.join(members)}", flush=True)
    return 0


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


def parse(words: list[str]) -> NodeCheck:
    """Return the check that the words describe."""
    parser = argparse.ArgumentParser(prog="node_check.py", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--names", nargs="+", required=True)
    parser.add_argument("--name", default=os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    parser.add_argument("--need", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--interfaces", default="")
    parser.add_argument("--infiniband", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--skip", default="")
    parser.add_argument("--least", type=float, default=0.0)
    parser.add_argument("--clock", type=float, default=5.0)
    parser.add_argument("--timeout", type=int, required=True)
    args = parser.parse_args(words)
    tree = vars(args) | {key: [word for word in getattr(args, key).split(",") if word] for key in ("interfaces", "skip")}
    return NodeCheck(**tree, deadline=time.monotonic() + args.timeout)


if __name__ == "__main__":
    sys.exit(run(parse(sys.argv[1:])))
