"""The check of a job's machines: bad ones are named, or left out where there are spares; the head's address is no loopback."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launch import node_check, node_facts

PROGRAM = Path(node_check.__file__)
QUICK = ["--skip", "all_reduce", "--timeout", "60"]  # nothing imports PyTorch
# a machine whose clock is a minute ahead
AHEAD = f"""
import sys, time, types
sys.path.insert(0, {str(PROGRAM.parent)!r})
import node_facts
node_facts.time = types.SimpleNamespace(time=lambda: time.time() + 60)
import node_check
sys.exit(node_check.run(node_check.parse(sys.argv[1:])))
"""


class Machines:
    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, list(names)
        self.folder.mkdir()
        self._started: dict[str, subprocess.Popen[str]] = {}

    def start(
        self, name: str, *words: str, enter: Sequence[str] = (), program: Sequence[str] = (str(PROGRAM),), path: str = ""
    ) -> None:
        environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
        command = [
            *enter,
            sys.executable,
            *program,
            "--folder",
            str(self.folder),
            "--names",
            *self.names,
            "--name",
            name,
            *words,
        ]
        self._started[name] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )  # fmt: skip

    def end(self) -> str:
        """Wait for all; return the output of the first, whose status says whether the job can start."""
        outputs = {}
        for name, process in self._started.items():
            outputs[name], _ = process.communicate(timeout=120)
        first = self._started[self.names[0]]
        assert (first.returncode == 0) == (self.folder / "good").exists() != (self.folder / "fault").exists(), outputs
        return outputs[self.names[0]]

    @property
    def good(self) -> list[str]:
        return (self.folder / "good").read_text().split()

    @property
    def fault(self) -> str:
        return (self.folder / "fault").read_text()


def test_good_machines_are_taken_and_an_endpoint_is_chosen(tmp_path: Path) -> None:
    machines = Machines(tmp_path / "check", ["a", "b"])
    for name in machines.names:
        machines.start(name, "--need", "2", *QUICK)
    said = machines.end()
    assert machines.good == ["a", "b"] and "good: a, b" in said
    address, port = (machines.folder / "endpoint").read_text().split()
    assert not address.startswith("127.") and address in dict(map(reversed, node_facts.addresses()))
    with socket.socket() as s:
        s.bind(("", int(port)))  # it is free when the run starts
    interface = node_facts.interface_of(address)
    lines = f"export GLOO_SOCKET_IFNAME={interface}\nexport NCCL_SOCKET_IFNAME=={interface}\n"
    assert (machines.folder / "b.sh").read_text() == lines


@pytest.mark.full
def test_a_machine_without_the_shared_folder_is_named(tmp_path: Path) -> None:
    machines = Machines(tmp_path / "check", ["a", "b"])
    (tmp_path / "own").mkdir()
    machines.start("a", "--need", "2", "--skip", "all_reduce", "--timeout", "10")
    machines.start("b", "--need", "2", "--skip", "all_reduce", "--timeout", "10", "--folder", str(tmp_path / "own"))
    machines.end()
    assert machines.fault.startswith("b: does not see ")


def nvidia_smi(folder: Path, gpus: int, driver: str = "580.65.06") -> str:
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/bash\nfor i in $(seq {gpus}); do echo {driver}; done\n")
    (folder / "nvidia-smi").chmod(0o755)
    return str(folder)


NO_TORCH = ["--skip", "all_reduce,driver,cudnn", "--timeout", "60"]


def test_a_bad_machine_ends_the_job_or_is_left_out_for_a_spare(tmp_path: Path) -> None:
    """The first machine is the bad one: another becomes the head."""
    whole, half = nvidia_smi(tmp_path / "eight", 8), nvidia_smi(tmp_path / "seven", 7)
    machines = Machines(tmp_path / "two", ["a", "b"])
    machines.start("a", "--need", "2", "--gpus", "8", *NO_TORCH, path=half)
    machines.start("b", "--need", "2", "--gpus", "8", *NO_TORCH, path=whole)
    machines.end()
    assert "a: has 7 GPUs, and gpus_per_node is 8; drain it, or correct gpus_per_node" in machines.fault

    machines = Machines(tmp_path / "three", ["a", "b", "c"])
    for name in machines.names:
        machines.start(name, "--need", "2", "--gpus", "8", *NO_TORCH, path=half if name == "a" else whole)
    said = machines.end()
    assert machines.good == ["b", "c"]
    assert "left out: a: has 7 GPUs" in said


def test_a_clock_that_is_ahead_is_named(tmp_path: Path) -> None:
    machines = Machines(tmp_path / "check", ["a", "b"])
    machines.start("a", "--need", "2", *QUICK)
    machines.start("b", "--need", "2", *QUICK, program=["-c", AHEAD])
    machines.end()
    assert "b: its clock is +60.0 s from a's, and node_check.max_clock_seconds=5; synchronize it" in machines.fault

    machines = Machines(tmp_path / "unlooked", ["a", "b"])
    machines.start("a", "--need", "2", "--skip", "all_reduce,clock", "--timeout", "60")
    machines.start("b", "--need", "2", "--skip", "all_reduce,clock", "--timeout", "60", program=["-c", AHEAD])
    machines.end()
    assert machines.good == ["a", "b"]


def test_a_port_in_use_and_a_missing_interface_are_named(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        machines = Machines(tmp_path / "port", ["a", "b"])
        for name in machines.names:
            machines.start(name, "--need", "2", "--port", str(s.getsockname()[1]), *QUICK)
        machines.end()
        assert "a: port " in machines.fault and "set network.port to another one, or to null for a free one" in machines.fault
    machines = Machines(tmp_path / "interface", ["a"])
    machines.start("a", "--interfaces", "bond7", *QUICK)
    machines.end()
    assert "a: has no interface bond7 with an address (it has " in machines.fault
    assert "correct network.interface, or set null" in machines.fault


@pytest.mark.parametrize(
    ("driver", "versions", "said"),
    [
        ("550.54.14", {"cuda": "13.0", "works": False}, "driver 550.54.14 is too old for CUDA 13.0, which needs release 580"),
        ("550.54.14", {"cuda": "13.0", "works": True}, None),  # cuda-compat
        ("580.65.06", {"cuda": "13.0", "works": True}, None),
        ("580.65.06", {"cuda": "13.0", "works": False}, "PyTorch with CUDA 13.0 cannot use the GPUs (driver 580.65.06)"),
        ("550.54.14", {"cuda": "12.8", "works": True}, None),
        ("470.10", {"cuda": "12.8", "works": False}, "needs release 525 or newer; update it, or install cuda-compat-12-8"),
        ("570.1", {"cuda": "14.1", "works": False}, "is too old for CUDA 14.1"),
        (None, {"cuda": None, "works": False}, None),  # PyTorch for CPUs
    ],
)
def test_the_driver_has_to_be_new_enough_for_cuda(driver: str | None, versions: dict[str, object], said: str | None) -> None:
    found = node_facts.driver_fault(driver, versions)
    assert (found is None) == (said is None)
    assert said is None or (found is not None and said in found)


def test_the_machine_with_other_versions_is_named() -> None:
    facts = {name: {"versions": json.dumps({"torch": version})} for name, version in [("a", "1"), ("b", "2"), ("c", "1")]}
    assert node_facts.differing(facts, ["a", "b", "c"]) == ["b"]
