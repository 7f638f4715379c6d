"""The program on the head of a Ray cluster: `python on_ray.py PLAN` runs the scripts of a job's plan.

A copy of this file lies next to the plan. It needs Python, Ray, and supervise.py next to it, and nothing else of this project.
One actor per machine, with all its GPUs, supervises that machine's scripts. If one fails or a machine is lost, all others are
ended. Then the whole job is started again on the available machines, unless the plan's limits are reached. Ending this program
ends everything.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 60.0  # time limit for an answer of a machine; longer than Ray takes to notice a lost one
_END_SECONDS = 60.0  # time to end all processes of a machine; supervise.py kills them after half of it
_GONE_SECONDS = 10.0  # in which machines that are taken away are gone, after the run has saved and ended
_STOPPED = "stop.done"  # in the run's folder: the run was asked to end and did (tepo_megatron/utils/save_requests.py)
_CHECK = "check"  # name of the script that checks the machines
_HEAD = "node:__internal_head__"  # a resource that only Ray's head node has


@dataclass(frozen=True)
class PlannedScript:
    """A script in the plan. It runs once on each of `nodes` machines from the `first` on, with one log per machine."""

    name: str
    path: str
    nodes: int
    first: int
    log: str

    def runs_on(self, machine: int) -> bool:
        """Return whether the script runs on the machine with this index."""
        return self.first <= machine < self.first + self.nodes


@dataclass(frozen=True)
class RayJobPlan:
    """The plan that `launch` wrote.

    The job ends when the first script has ended on all its machines. The end of another script is a failure. Before them the
    script `check`, if there is one, checks all machines.
    """

    job: str
    machines: int
    gpus: int
    port: int
    wait_seconds: int
    restarts: int
    error_restarts: int
    idle_starts: int
    checkpoints: str | None
    check: PlannedScript | None
    state: str
    log: str
    scripts: list[PlannedScript]

    @classmethod
    def read(cls, path: str) -> RayJobPlan:
        """Read the plan from its file."""
        tree = json.loads(Path(path).read_text())
        check = None if tree["check"] is None else PlannedScript(**tree["check"])
        return cls(**tree | {"scripts": [PlannedScript(**script) for script in tree["scripts"]], "check": check})


@dataclass
class RayJobState:
    """State that must outlive this program.

    Attributes:
        failed_at: Newest checkpoint at each failure.
        idle: Starts in a row that were asked to end before they had a new checkpoint.
    """

    starts: int = 0
    failed_at: list[str] = field(default_factory=list)
    idle: int = 0

    @classmethod
    def read(cls, path: Path) -> RayJobState:
        """Read the state from its file; a new job has the initial state."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: Path) -> None:
        """Write the state atomically."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)) + "\n")
        part.replace(path)


class RayJobFailure(Exception):
    """A start of the job has ended; the message says why and where."""


class RayMachine:
    """An actor that supervises the scripts of one machine. It is killed with its node; then supervise.py ends the scripts."""

    def __init__(self) -> None:
        self._kept: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: dict[str, int] = {}

    def start(self, name: str, words: list[str], more: dict[str, str]) -> None:
        """Start one script with the environment of the machine, not of the actor (Ray sets OMP_NUM_THREADS there)."""
        environ = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode(errors="surrogateescape")
        inherited = dict(entry.split("=", 1) for entry in environ.split("\0") if "=" in entry)
        pipe = subprocess.PIPE
        self._kept[name] = subprocess.Popen([sys.executable, *words], stdin=pipe, stdout=pipe, env=inherited | more)
        self._kept[name].wait()  # reap the process that supervise.py detaches from

    def free_port(self) -> int:
        """Return a port of this machine that nobody listens on."""
        with socket.socket() as s:
            s.bind(("", 0))
            return int(s.getsockname()[1])

    def ended(self) -> dict[str, int]:
        """Return the exit statuses of the scripts that have ended, with all their processes."""
        return self._look(0)

    def end(self) -> dict[str, int]:
        """End all scripts, wait for their end, and return what `ended` returns then."""
        for kept in self._kept.values():
            assert kept.stdin is not None
            kept.stdin.close()
        deadline = time.monotonic() + _END_SECONDS
        while len(self._look(0.1)) < len(self._kept) and time.monotonic() < deadline:
            pass
        return self._ended

    def _look(self, seconds: float) -> dict[str, int]:
        outputs = {kept.stdout: name for name, kept in self._kept.items() if name not in self._ended}
        for output in select.select(list(outputs), [], [], seconds)[0]:
            assert output is not None
            line = output.readline()  # written at once, so never partial; empty if supervise.py was killed
            self._ended[outputs[output]] = int(line or 137)
        return self._ended


class RayJobRunner:
    """A job on the Ray cluster, with all its starts."""

    def __init__(self, plan: RayJobPlan, supervisor: Path) -> None:
        self._plan = plan
        self._supervisor = supervisor
        self._actor = ray.remote(num_cpus=0, num_gpus=plan.gpus, max_restarts=0)(RayMachine)

    def run(self) -> int:
        """Start the job until it is done. Return 0 if the first script succeeded, and 1 if the job is given up."""
        state = RayJobState.read(Path(self._plan.state))
        while True:
            try:
                nodes = self._machines()
            except RayJobFailure as e:
                self._say(f"{e}: this is the end")
                return 1
            state.starts += 1
            state.write(Path(self._plan.state))
            began = self._newest()
            try:
                self._start(nodes, state.starts - 1)
                return 0
            except RayJobFailure as e:
                said = str(e)
            newest, stopped = self._newest(), self._plan.checkpoints is not None and self._answer_to_stop.exists()
            if stopped:
                said, state.idle = "the run has saved and ended", state.idle + 1 if newest == began else 0
            else:
                state.failed_at.append(newest)
            state.write(Path(self._plan.state))
            if state.starts > self._plan.restarts:
                self._say(f"{said}, and {self._plan.restarts} restarts (kuberay.restarts) were made: this is the end")
                return 1
            if not stopped and state.failed_at.count(newest) > self._plan.error_restarts:
                limit = f"where kuberay.error_restarts={self._plan.error_restarts} were made"
                self._say(f"{said}; newest checkpoint: {newest}, {limit}: this is the end")
                return 1
            if stopped and state.idle >= self._plan.idle_starts > 0:
                said = f"{said}; newest checkpoint: {newest}, as at the beginning of {state.idle} starts in a row"
                self._say(f"{said}: this is the end; use machines that stay longer than a step, or raise kuberay.idle_starts")
                return 1
            self._say(f"{said}; started again; newest checkpoint: {newest}")
            if stopped:
                time.sleep(_GONE_SECONDS)
                self._answer_to_stop.unlink(missing_ok=True)

    def _machines(self) -> list[Any]:
        """Return a responsive actor on each required machine. Raise Failure if the machines are not available in time."""
        deadline, last_logged = time.monotonic() + self._plan.wait_seconds, 0.0
        while True:
            nodes = sorted(filter(self._usable, ray.nodes()), key=lambda node: (node["NodeName"], node["NodeID"]))
            if len(nodes) >= self._plan.machines:
                found = self._held([node["NodeID"] for node in nodes[: self._plan.machines]])
                if found is not None:
                    return found
            if time.monotonic() > deadline:
                raise RayJobFailure(f"{len(nodes)} of {self._plan.machines} machines after {self._plan.wait_seconds} s")
            if time.monotonic() > last_logged + 60:
                last_logged = time.monotonic()
                self._say(f"{len(nodes)} of {self._plan.machines} machines are there; waiting for the others")
            time.sleep(_LOOK_SECONDS)

    def _usable(self, node: dict[str, Any]) -> bool:
        resources = node["Resources"]
        return node["Alive"] and _HEAD not in resources and resources.get("GPU", 0) >= self._plan.gpus

    def _held(self, ids: list[str]) -> list[Any] | None:
        """Return the actors; None if one does not answer, because its machine is gone and Ray has not noticed yet."""
        where = [NodeAffinitySchedulingStrategy(node_id=id, soft=False) for id in ids]
        actors = [self._actor.options(scheduling_strategy=strategy).remote() for strategy in where]
        try:
            ray.get([actor.ended.remote() for actor in actors], timeout=_ANSWER_SECONDS)
        except RayError:
            for actor in actors:
                ray.kill(actor)
            return None
        return list(zip(ids, actors, strict=True))

    def _start(self, machines: list[Any], start: int) -> None:
        """Run one start of the job. Before it raises Failure, it ends everything that can be ended."""
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        actors = [actor for _, actor in machines]
        names = [f"machine {i} ({addresses[id]})" for i, (id, _) in enumerate(machines)]
        shared = {
            "LAUNCH_JOB": self._plan.job,
            "LAUNCH_START": str(start),
            "MASTER_ADDR": addresses[machines[0][0]],
            "MASTER_PORT": str(self._plan.port or self._answers({actors[0].free_port.remote(): names[0]})[0]),
            "LAUNCH_NAMES": " ".join(f"machine-{i}" for i in range(len(actors))),
            "LAUNCH_CHECK": f"{Path(self._plan.state).parent}/check-{start}",
        }
        if shared["MASTER_ADDR"].startswith("127.") and len({addresses[id] for id, _ in machines}) > 1:
            raise RayJobFailure(f"{names[0]} has given Ray a loopback address, which no other machine reaches")
        own = [{"LAUNCH_MACHINE": str(i), "LAUNCH_ADDRESS": addresses[id]} for i, (id, _) in enumerate(machines)]
        self._say(f"start {start} on {', '.join(names)}")
        try:
            shared |= self._checked(actors, names, shared, own)
            started = {}
            for script in self._plan.scripts:
                for i in filter(script.runs_on, range(len(actors))):
                    words = [str(self._supervisor), script.log.format(machine=i), "bash", script.path]
                    started[actors[i].start.remote(script.name, words, shared | own[i])] = names[i]
            self._answers(started)
            while not self._done([self._answers({a.ended.remote(): n})[0] for a, n in zip(actors, names, strict=True)], names):
                time.sleep(_LOOK_SECONDS)
        finally:
            ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=_END_SECONDS + _ANSWER_SECONDS)
            for actor in actors:
                ray.kill(actor)

    def _checked(
        self, actors: list[Any], names: list[str], shared: dict[str, str], own: list[dict[str, str]]
    ) -> dict[str, str]:
        """Check all machines. Return the variables of the head's address that the check chose; none without a check.

        Raises:
            RayJobFailure: A machine is bad.
        """
        check = self._plan.check
        if check is None:
            return {}
        words = [[str(self._supervisor), check.log.format(machine=i), "bash", check.path] for i in range(len(actors))]
        started = [actor.start.remote(_CHECK, words[i], shared | own[i]) for i, actor in enumerate(actors)]
        self._answers(dict(zip(started, names, strict=True)))
        while not all(_CHECK in self._answers({a.ended.remote(): n})[0] for a, n in zip(actors, names, strict=True)):
            time.sleep(_LOOK_SECONDS)
        folder = Path(shared["LAUNCH_CHECK"])
        if not (folder / "good").exists():
            fault = folder / "fault"
            said = "; ".join(fault.read_text().splitlines()) if fault.exists() else "it gave no result; its log says why"
            raise RayJobFailure(f"node check: {said}")
        address, port = (folder / "endpoint").read_text().split()
        return {"MASTER_ADDR": address, "MASTER_PORT": port}

    def _answers(self, asked: dict[Any, str]) -> list[Any]:
        try:
            return [self._answer(ref, name) for ref, name in asked.items()]
        except RayError as e:
            raise RayJobFailure(f"{type(e).__name__}: {e}") from None

    def _answer(self, ref: Any, name: str) -> Any:
        try:
            return ray.get(ref, timeout=_ANSWER_SECONDS)
        except RayActorError:
            raise RayJobFailure(f"{name} is lost") from None
        except GetTimeoutError:
            raise RayJobFailure(f"{name} did not answer within {_ANSWER_SECONDS:.0f} s") from None

    def _done(self, ended: list[dict[str, int]], names: list[str]) -> bool:
        """Return whether the first script succeeded on all its machines. Raise Failure if one failed or another one ended."""
        first = self._plan.scripts[0]
        for name, statuses in zip(names, ended, strict=True):
            for script, status in statuses.items():
                if script != _CHECK and (status or script != first.name):
                    raise RayJobFailure(f"{script} on {name} ended with status {status}")
        return sum(first.name in statuses for statuses in ended) == first.nodes

    def _newest(self) -> str:
        """Return the newest complete checkpoint of the run."""
        names = [p.name for p in Path(self._plan.checkpoints or "").glob("step-*") if re.fullmatch(r"step-\d+", p.name)]
        return max(names, key=lambda name: int(name.removeprefix("step-")), default="none")

    @property
    def _answer_to_stop(self) -> Path:
        return Path(self._plan.checkpoints or "").with_name(_STOPPED)

    def _say(self, text: str) -> None:
        line = f"launch: {text}"
        print(line, flush=True)
        with open(self._plan.log, "a") as log:
            log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {line}\n")


def main() -> int:
    """Run the plan and return the exit status of the job."""
    plan = RayJobPlan.read(sys.argv[1])
    ray.init(address="auto", log_to_driver=False)
    return RayJobRunner(plan, Path(__file__).absolute().with_name("supervise.py")).run()


if __name__ == "__main__":
    sys.exit(main())
