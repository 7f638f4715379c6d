"""The check of a job's machines: bad ones are named, or left out where there are spares; the head's address is no loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from launch import node_check, node_facts
from launch.__main__ import main
from launch.check_step import OWN_INTERFACES, check_lines
from launch.jobs import JobFolder
from launch.profile import Cluster
from tepo_megatron.config.io import validate_as
from tests import hosts

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
    """Machines of one check, each a process.

    Attributes:
        folder: Shared folder of the check.
        names: Names of all machines of the job.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, list(names)
        self.folder.mkdir()
        self._started: dict[str, subprocess.Popen[str]] = {}

    def start(
        self, name: str, *words: str, enter: Sequence[str] = (), program: Sequence[str] = (str(PROGRAM),), path: str = ""
    ) -> None:
        """Start the check on one machine.

        Args:
            name: Name of the machine.
            words: Further options.
            enter: Prefix of the command line.
            program: Words of Python instead of the program.
            path: Folder that is searched for programs first.
        """
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
        """Return the machines that the job uses."""
        return (self.folder / "good").read_text().split()

    @property
    def fault(self) -> str:
        """Return the message with which the job ends."""
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
def test_a_machine_that_does_not_start_is_named(tmp_path: Path) -> None:
    machines = Machines(tmp_path / "check", ["a", "b"])
    machines.start("a", "--need", "2", "--skip", "all_reduce", "--timeout", "10")
    machines.end()
    assert machines.fault.startswith(f"b: does not see {machines.folder}, or did not start the check within 5 s")
    assert "1 of 2 machines are good, and 2 are needed" in machines.fault


@pytest.mark.full
def test_a_machine_without_the_shared_folder_is_named(tmp_path: Path) -> None:
    machines = Machines(tmp_path / "check", ["a", "b"])
    (tmp_path / "own").mkdir()
    machines.start("a", "--need", "2", "--skip", "all_reduce", "--timeout", "10")
    machines.start("b", "--need", "2", "--skip", "all_reduce", "--timeout", "10", "--folder", str(tmp_path / "own"))
    machines.end()
    assert machines.fault.startswith("b: does not see ")


def nvidia_smi(folder: Path, gpus: int, driver: str = "580.65.06") -> str:
    """Write an `nvidia-smi` that lists some GPUs; return its folder."""
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


@pytest.mark.parametrize(
    ("wanted", "missing"),
    [("", []), ("mlx5", []), ("=mlx5_0,mlx5_1:1", []), ("=mlx5", ["mlx5"]), ("^mlx5_9", []), ("mlx5,efa", ["efa"])],
)
def test_rdma_adapters_that_nccl_would_not_find_are_named(tmp_path: Path, wanted: str, missing: list[str]) -> None:
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / name).mkdir()
    found = node_facts.adapter_faults(wanted, tmp_path)
    assert found == [
        f"has no RDMA adapter {name} (it has mlx5_0, mlx5_1); correct network.infiniband, or set null" for name in missing
    ]


def test_the_machine_with_other_versions_is_named() -> None:
    facts = {name: {"versions": json.dumps({"torch": version})} for name, version in [("a", "1"), ("b", "2"), ("c", "1")]}
    assert node_facts.differing(facts, ["a", "b", "c"]) == ["b"]


@pytest.fixture
def two() -> Sequence[hosts.Host]:
    if why := hosts.missing():
        pytest.skip(why)
    with hosts.two_hosts() as two:
        yield two


@pytest.mark.full
def test_the_head_is_not_found_by_a_name_that_is_a_loopback_address(two: Sequence[hosts.Host], tmp_path: Path) -> None:
    """Debian and Ubuntu write the host's own name as 127.0.1.1; NeMo-Run's script asks for that with `hostname -i`."""
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    machines = Machines(tmp_path / "check", ["a", "b"])
    for name, host in zip(machines.names, two, strict=True):
        host.call("mount", "--bind", str(tmp_path / "hosts"), "/etc/hosts")
        assert host.call("hostname", "--ip-address").strip() == "127.0.1.1"
        machines.start(name, "--need", "2", "--timeout", "100", enter=host.enter)
    said = machines.end()
    assert (machines.folder / "endpoint").read_text().split()[0] == two[0].address
    assert (machines.folder / "a.sh").read_text().startswith(f"export GLOO_SOCKET_IFNAME={hosts.DEVICE}\n")
    assert "all-reduce over 2 machines x 1: " in said and "GB/s of bus bandwidth" in said


@pytest.mark.slow
def test_the_head_has_an_interface_that_no_other_machine_reaches(two: Sequence[hosts.Host], tmp_path: Path) -> None:
    two[0].call("ip", "link", "add", "mgmt0", "type", "veth", "peer", "name", "mgmt1")
    for words in (
        ["address", "add", "10.99.0.1/30", "dev", "mgmt0"],
        ["link", "set", "mgmt0", "up"],
        ["link", "set", "mgmt1", "up"],
    ):
        two[0].call("ip", *words)
    machines = Machines(tmp_path / "check", ["a", "b"])
    for name, host in zip(machines.names, two, strict=True):
        machines.start(name, "--need", "2", *QUICK, enter=host.enter)
    machines.end()
    assert (machines.folder / "endpoint").read_text().split()[0] == two[0].address
    for name in machines.names:
        assert f"GLOO_SOCKET_IFNAME={hosts.DEVICE}\n" in (machines.folder / f"{name}.sh").read_text()


@pytest.mark.slow
def test_machines_that_do_not_reach_each_other_are_named(two: Sequence[hosts.Host], tmp_path: Path) -> None:
    two[1].link("down")
    machines = Machines(tmp_path / "check", ["a", "b"])
    for name, host in zip(machines.names, two, strict=True):
        machines.start(name, "--need", "2", *QUICK, enter=host.enter)
    machines.end()
    assert "a: no other machine reaches it at veth0 10.213.77.1; check its firewall, or set network.interface" in machines.fault


# an `srun` that runs the step on each machine of `nodes`, and a node check without PyTorch
SRUN = """#!/bin/bash
while [ "$1" != bash ]; do shift; done
for node in $NODES; do SLURMD_NODENAME=$node "$@" >> "$CHECK_LOG" 2>&1 & done
wait
"""


def batch(folder: Path, names: str, missing: str = "") -> subprocess.CompletedProcess[str]:
    """Run the code of a batch script for a job of two machines, with a profile that allows one spare."""
    check = {"skip": ["all_reduce"], "spare_nodes": 1, "timeout_seconds": 30}
    tree = {"python": sys.executable, "slurm": {"account": "lab", "setup": ["export MODULE=loaded"]}, "node_check": check}
    slot = JobFolder(folder / "run", 1)
    slot.create()
    code = check_lines(validate_as(Cluster, tree, "c"), folder, slot, 2, 0, ["NOTE"])
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "CHECK_LOG": str(folder / "log")}
    environment["NODES"] = " ".join(name for name in names.split() if name != missing)
    script = f'nodes=({names})\n{code}\necho "${{nodes[*]}} from $head_node, $MASTER_ADDR $MASTER_PORT"\n'
    script += f"SLURMD_NODENAME=$head_node\n{OWN_INTERFACES}\necho $GLOO_SOCKET_IFNAME\n"
    return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_the_batch_script_goes_on_with_the_good_machines_alone(tmp_path: Path) -> None:
    done = batch(tmp_path, "n1 n2 n3", missing="n2")
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log").read_text()
    interface, address = node_facts.addresses()[0]
    assert done.stdout.startswith(f"n1 n3 from n1, {address} ") and done.stdout.endswith(f"\n{interface}\n")
    assert "node check: left out: n2: does not see" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_the_batch_script_ends_with_one_clear_message(tmp_path: Path) -> None:
    done = batch(tmp_path, "n1 n2", missing="n2")
    assert done.returncode == 1
    first, second, third = done.stdout.splitlines()
    assert (
        first == f"launch: the node check failed and nothing was started; {tmp_path}/run/launch/run-check-7.log has all of it:"
    )
    assert second.startswith("n2: does not see ") and third == "1 of 2 machines are good, and 2 are needed"


def test_doctor_checks_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def doctor(*words: str, **keys: object) -> tuple[int, str]:
        profile = tmp_path / "mine.yaml"
        profile.write_text(yaml.safe_dump({"python": sys.executable, "node_check": {"skip": ["all_reduce"]}, **keys}))
        status = main(["doctor", "--cluster", str(profile), *words])
        out, err = capfd.readouterr()
        return status, out + err

    assert doctor()[0] == 0
    status, said = doctor(gpus_per_node=8, node_check={"skip": ["all_reduce", "driver", "cudnn"]})
    assert status == 1 and "has no nvidia-smi, and the job needs GPUs" in said
    assert doctor("--cpu", ranks_per_node=8)[0] == 0
    status, said = doctor(python="/nowhere/python")
    assert status == 1 and "python=/nowhere/python: No such file" in said
    assert "node_check.py --folder" in doctor("--dry-run")[1]
    assert "--nodes 0: give at least 1" in doctor("--nodes", "0")[1]


def test_no_module_of_the_folder_hides_one_of_python() -> None:
    """The programs run from launch/, which has a profile.py as Python has, and PyTorch imports that one."""
    code = "import launch.node_check, profile, cProfile; print(profile.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PROGRAM.parents[1], check=True)
    assert "launch" not in Path(done.stdout.strip()).parts
    code = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[1] + '/node_check.py'); import cProfile"
    subprocess.run([sys.executable, "-c", code, str(PROGRAM.parent)], check=True)
