"""`python -m launch ... --executor kuberay`: what would be sent, what is refused, and what an API server is asked."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.executors import kuberay
from launch.jobs import JobFolder
from launch.profile import Cluster
from launch.ray_plan import PROGRAM, SUPERVISOR, RayJob
from launch.scripts import Task
from launch.sections import KubeRayConfig
from tepo_megatron.errors import ConfigError
from tests.launch import cases, kuberay_cases
from tests.launch.test_dry_run import wait_for
from tests.launch.test_profiles import cluster, run
from tests.scripted_kubernetes import serving

pytestmark = pytest.mark.slow

KUBERAY = ["run.yaml", "--executor", "kuberay", "--no-preflight", "--allow-dirty"]
SECTION = {"claims": {"a": "/work"}, "cpu": "8", "memory": "64Gi"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    return kuberay_cases.dry_runs(tmp_path_factory.mktemp("project"))


def parts(text: str) -> dict[str, str]:
    """Split the output by the name of the file."""
    found = [part.partition("\n") for part in text.split("#==== ")[1:]]
    return {Path(path).name: body for path, _, body in found}


@pytest.mark.parametrize("case", kuberay_cases.CASES)
def test_a_dry_run_prints_the_manifest_the_plan_and_the_scripts(
    results: dict[str, tuple[int, str, str]], case: str, tmp_path: Path
) -> None:
    status, text, error = results[case]
    assert (status, error) == (0, "")
    assert text == (cases.GOLDEN / f"{case}.txt").read_text()
    assert cases.SECRET not in text
    files = parts(text)
    for name in (name for name in files if name.endswith(".sh")):
        (tmp_path / name).write_text(files[name])
        subprocess.run(["bash", "-n", tmp_path / name], check=True)


def test_what_a_pod_needs_is_in_the_manifest(results: dict[str, tuple[int, str, str]]) -> None:
    files = parts(results["kuberay_apart"][1])
    body, plan = yaml.safe_load(files["rayjob.yaml"]), json.loads(files["plan.json"])
    spec = body["spec"]["rayClusterSpec"]
    (group,) = spec["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == plan["machines"] == 4
    head, worker = (pod["template"]["spec"] for pod in (spec["headGroupSpec"], group))
    assert "nvidia.com/gpu" not in str(head) and worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    for pod in (head, worker):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
        assert mounts["/project"]["persistentVolumeClaim"] == {"claimName": "home.of.all"}
        environment = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
        assert environment["WANDB_API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "keys", "key": "WANDB_API_KEY"}}
        assert environment["NOTE"]["value"] == "it's $$HOME"  # Kubernetes replaces $$ with $
    assert body["spec"]["entrypoint"].split()[1:] == [
        f"/project/runs/qwen/launch/experiments/qwen/qwen_1/{name}" for name in ("on_ray.py", "plan.json")
    ]


def faults_of(manifests: list[Any]) -> list[list[str]]:
    """Return the faults of RayJobs under the published schema of KubeRay and Kubernetes."""
    words, environment = [cases.PYTHON, "-m", "tests.launch.kuberay_schema"], {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        words, input=json.dumps(manifests), cwd=cases.ROOT, env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [list(found) for found in json.loads(done.stdout)]


@pytest.mark.full
def test_every_manifest_conforms_to_the_schema_of_its_resource(
    results: dict[str, tuple[int, str, str]], tmp_path: Path
) -> None:
    """The last one is of a profile with every key of the section."""
    every = kuberay_cases.with_every_key(tmp_path)
    assert every[0] == 0, every[2]
    texts = [text for _, text, _ in (*results.values(), every)]
    assert faults_of([yaml.safe_load(parts(text)["rayjob.yaml"]) for text in texts]) == [[]] * len(texts)


# path of a field in a manifest -> value to set (None: remove it), and the fault
SPEC = "spec.rayClusterSpec"
POD, CONTAINER = f"{SPEC}.workerGroupSpecs.0.template.spec", f"{SPEC}.workerGroupSpecs.0.template.spec.containers.0"
PLANTED = {
    "spec.entryPoint": ("x", ".spec.entryPoint: a RayJobSpec has no such field"),
    "spec.shutdownAfterJobFinishes": ("true", ".spec.shutdownAfterJobFinishes: 'true' is no bool"),
    "spec.backoffLimit": (True, ".spec.backoffLimit: True is no int"),
    f"{SPEC}.rayVersion": (2.6, ".rayVersion: 2.6 is no str"),
    f"{SPEC}.headGroupSpec.template": (None, ".headGroupSpec.template: is missing in a HeadGroupSpec"),
    f"{SPEC}.headGroupSpec.rayStartParams.num-cpus": (0, ".rayStartParams.num-cpus: 0 is no str"),
    f"{SPEC}.workerGroupSpecs.0.groupName": (None, ".groupName: is missing in a WorkerGroupSpec"),
    f"{SPEC}.workerGroupSpecs.0.replicas": ("1", ".replicas: '1' is no int"),
    f"{SPEC}.workerGroupSpecs.0.template.spec.nodeSelectors": ({}, ".nodeSelectors: a V1PodSpec has no such field"),
    f"{POD}.containers": (None, ".containers: is missing in a V1PodSpec"),
    f"{POD}.tolerations": ({"key": "a"}, ".tolerations: {'key': 'a'} is no list"),
    f"{POD}.volumes.0.persistentVolumeClaim.claim": ("a", ".claim: a V1PersistentVolumeClaimVolumeSource has no such field"),
    f"{POD}.securityContext.runAsUser": ("10001", ".securityContext.runAsUser: '10001' is no int"),
    f"{CONTAINER}.name": (None, ".containers[0].name: is missing in a V1Container"),
    f"{CONTAINER}.command": ("bash", ".containers[0].command: 'bash' is no list"),
    f"{CONTAINER}.env.0.value": (0, ".env[0].value: 0 is no str"),
    f"{CONTAINER}.resources.limits.memory": ("64 GB", ".resources.limits.memory: '64 GB' is no quantity"),
    f"{CONTAINER}.volumeMounts.0.mountpath": ("/a", ".mountpath: a V1VolumeMount has no such field"),
    f"{CONTAINER}.lifecycle.preStop.exec.command": (None, None),  # not required
}


@pytest.mark.full
def test_the_schema_finds_misspelt_fields_wrong_types_and_missing_fields(
    results: dict[str, tuple[int, str, str]],
) -> None:
    planted = []
    for path, (value, _) in PLANTED.items():
        body = yaml.safe_load(parts(results["kuberay_colocated"][1])["rayjob.yaml"])
        *above, last = path.split(".")
        place = body
        for key in above:
            place = place[int(key)] if isinstance(place, list) else place[key]
        if value is None:
            del place[last]
        else:
            place[last] = value
        planted.append(body)
    for (path, (_, said)), found in zip(PLANTED.items(), faults_of(planted), strict=True):
        assert [fault.endswith(said) for fault in found] == [True] if said else found == [], (path, found)


@pytest.mark.parametrize("program", [PROGRAM, SUPERVISOR])
def test_a_pod_that_is_to_be_ended_asks_the_run_to_save_and_waits(
    results: dict[str, tuple[int, str, str]], tmp_path: Path, program: str
) -> None:
    """Run the hook of a pod's container next to a process of the job's program, with a function in place of `ray`."""
    spec = yaml.safe_load(parts(results["kuberay_apart"][1])["rayjob.yaml"])["spec"]["rayClusterSpec"]
    group = spec["headGroupSpec"] if program == PROGRAM else spec["workerGroupSpecs"][0]
    pod = group["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 300
    *shell, script = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    run = tmp_path / "runs" / "qwen"
    run.mkdir(parents=True)
    stop, stopped = run / "stop.request", run / "stop.done"

    def hook() -> subprocess.Popen[str]:
        named = script.replace("/project", str(tmp_path)).replace("/proc/[0-9]*", f"/proc/{running.pid}")
        return subprocess.Popen([*shell, f"ray() {{ echo $*; }}; {named}"], stdout=subprocess.PIPE, text=True)

    with subprocess.Popen(["bash", "-c", "read", program], stdin=subprocess.PIPE) as running:
        with hook() as asking:
            wait_for(stop.exists)
            assert asking.poll() is None
            stopped.touch()
            if program == SUPERVISOR:  # the run ends in this pod
                running.kill()
            assert asking.communicate(timeout=30)[0] == "stop\n"
        running.kill()
        running.wait()
        stop.unlink()
        stopped.unlink()
        with hook() as at_the_end:
            assert at_the_end.communicate(timeout=30)[0] == "stop\n" and not stop.exists()


def project(folder: Path, **more: Any) -> None:
    tree = kuberay_cases.prepare(folder)
    section = {**kuberay_cases.SECTION, "claims": {"a": str(folder)}}
    profiles = {
        "alone": {**tree, "kuberay": section},
        "imageless": {k: v for k, v in tree.items() if k != "container"},
        "pyxis": {**tree, "container": cases.CONTAINER},
        "secretless": {**tree, "kuberay": {**section, "secret": None}},
    }
    for name, profile in profiles.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(profile))


REFUSED = {
    "no section": (KUBERAY, "the cluster's profile has no kuberay section"),
    "no image": ([*KUBERAY, "--cluster", "imageless.yaml"], "names no container.image"),
    "mounts": ([*KUBERAY, "--cluster", "pyxis.yaml"], "container.mounts are Pyxis'"),
    "no secret": ([*KUBERAY, "--cluster", "secretless.yaml"], "name that with kuberay.secret"),
    "no volume": ([*KUBERAY, "--cluster", "alone.yaml"], "model.path=/shared/models/Qwen3-14B is on no volume of the pods"),
    "after": ([*KUBERAY, "--cluster", "k8s.yaml", "--after", "before"], "Kubernetes lets no job wait for another"),
    "no kubernetes": ([*KUBERAY, "--cluster", "k8s.yaml"], "no Kubernetes: Invalid kube-config file. No configuration found"),
    "no status": (["status", "ours"], "no Kubernetes: "),
}


def test_what_is_refused_in_a_line_for_each_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    project(tmp_path)
    JobFolder(tmp_path / "ours", 1).record("kuberay", "lab/a")
    answers = cases.call(tmp_path, {name: words for name, (words, _) in REFUSED.items()})
    for case, (status, _, error) in answers.items():
        assert status == 1 and error.startswith("launch: error: ") and "Traceback" not in error, (case, error)
        assert REFUSED[case][1] in error, case
    assert not (tmp_path / "runs" / "qwen" / "launch" / "jobs" / "1").exists()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"claims": {}}, r"kuberay: claims: name the PersistentVolumeClaim that holds the working directory"),
        ({"claims": {"a": "shared"}}, r"claims\.a: 'shared' is not an absolute path"),
        ({"claims": {"A": "/a"}}, r"claims\.A: 'A' is no name of Kubernetes"),
        ({"claims": {"a": "/a", "b": "/a"}}, r"claims: /a is the path of two"),
        ({"memory": "64 GB"}, r'memory=\'64 GB\' is no quantity of Kubernetes, as "32", "500m" or "512Gi"'),
        ({"namespace": "My Lab"}, r"namespace: 'My Lab' is no name of Kubernetes"),
        ({"worker": 1}, r"kuberay\.worker: unknown key"),
        ({"labels": {"a b": "c"}}, r"labels: a b: 'c' is no label of Kubernetes"),
        ({"labels": {"a": "c d"}}, r"labels: a: 'c d' is no label of Kubernetes"),
        ({"capabilities": ["CAP_IPC_LOCK"]}, r"capabilities: 'CAP_IPC_LOCK' is no capability .*as IPC_LOCK, without CAP_"),
    ],
)
def test_a_mistake_is_reported_with_its_key_and_the_fix(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster(kuberay=SECTION | keys)


def test_folders_that_a_shell_would_split_and_runs_that_would_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(folder: str, **keys: Any) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        section = {**SECTION, "claims": {"a": str(tmp_path), "m": "/m", "d": "/d"}, **keys.pop("section", {})}
        kuberay.check(cluster(container={"image": "i"}, kuberay=section), run(**keys))

    check("fine")
    check("fine", checkpoint={"every": 0}, section={"restarts": 0})
    with pytest.raises(ConfigError, match=r"checkpoint\.every=0: after a failure the run would start over.*kuberay\.restarts"):
        check("fine", checkpoint={"every": 0})
    with pytest.raises(ConfigError, match="my project/runs/a: KubeRay gives it to a shell as it is; use a folder of letters"):
        check("my project")
    with pytest.raises(ConfigError, match=r"the working directory=.* is on no volume of the pods"):
        check("fine", section={"claims": {"m": "/m", "d": "/d"}})


def test_names_that_kubernetes_takes() -> None:
    def name(run: str, home: str, number: int = 1) -> str:
        return RayJob(run, Path(home), number, [Task("train", "")], Cluster()).id

    assert name("Qwen3_14B-tepo.v2", "/a").startswith("tepo-qwen3-14b-tepo-v2-")
    assert len({name("a", "/a"), name("a", "/b"), name("a", "/a", 2)}) == 3
    assert len(name("x" * 99, "/a", 12345)) <= 47 and "--" not in name("__", "/a")


@pytest.mark.full
def test_a_job_is_submitted_queried_and_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-Run's manifest and Kubernetes' own client, over HTTP."""
    with serving(tmp_path) as (kubernetes, kubeconfig):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        kuberay_cases.prepare(tmp_path)
        words, status = (
            ["run.yaml", "--cluster", "k8s.yaml", "--executor", "kuberay", "--no-preflight", "--allow-dirty"],
            ["status", "runs/qwen"],
        )
        dry, sent, first = cases.call(tmp_path, {"dry": [*words, "--dry-run"], "sent": words, "status": status}).values()
        assert sent[0] == 0, sent[2]
        ((name, body),) = kubernetes.jobs.items()
        assert sent[1] == f"job lab/{name}; python -m launch status|logs|cancel|attach runs/qwen\n"
        assert body == yaml.safe_load(parts(dry[1])["rayjob.yaml"])
        folder = tmp_path / "runs" / "qwen" / "launch" / "experiments" / "qwen" / "qwen_1"
        written = {path.name: path.read_text() for path in folder.iterdir()}
        assert {n: text.rstrip() for n, text in parts(dry[1]).items()} == {
            n: text.rstrip() for n, text in written.items() if not n.endswith(".py")
        }
        assert {"on_ray.py", "supervise.py"} <= written.keys()
        assert cases.files_with_secret(tmp_path) == []

        assert first[1].endswith(": not seen by KubeRay's operator yet\n")
        body["status"] = {"jobDeploymentStatus": "Initializing", "rayClusterName": "c"}
        unmet = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes have GPUs"}
        kubernetes.pods = [
            {"metadata": {"name": "c-machines-1"}, "status": {"phase": "Pending", "conditions": [unmet]}},
            {"metadata": {"name": "submitter"}, "status": {"phase": "Running"}},
        ]
        kubernetes.printed = "launch: 1 of 4 machines are there\n"
        asked, printed = cases.call(tmp_path, {"status": status, "logs": ["logs", "runs/qwen"]}).values()
        assert ": Initializing\npod c-machines-1: Pending, Unschedulable: 0/4 nodes have GPUs\n" in asked[1]
        assert printed[1] == "launch: 1 of 4 machines are there\n"
        addresses = {"c-a": "10.0.0.7", "c-b": "10.0.0.30"}  # on_ray.py sorts addresses as text
        kubernetes.pods = [
            {"metadata": {"name": name}, "status": {"phase": "Running", "podIP": ip}} for name, ip in addresses.items()
        ]
        shown = {node: attached(tmp_path, "--node", node) for node in ("0", "1", "2")}
        assert shown["0"][0].startswith("kubectl exec -it -n lab c-b -- bash -c cd ") and "c-a --" in shown["1"][0]
        assert "--node 2: 2 machines of RayJob lab/" in shown["2"][1]
        (refused,) = cases.call(tmp_path, {"again": words}).values()
        assert refused[0] == 1 and "job 1 of this run (kuberay job lab/" in refused[2]

        (tmp_path / "runs" / "qwen" / "launch" / "qwen-train-0-1.log").write_text("step 1\n")
        calls = {word: [word, "runs/qwen"] for word in ("logs", "cancel", "status")}
        logs, cancelled, gone = cases.call(tmp_path, calls).values()
        assert logs[1].endswith("qwen-train-0-1.log\nstep 1\n")
        assert cancelled[1] == f"job lab/{name} is cancelled\n" and kubernetes.jobs == {}
        assert gone[0] == 1 and f'Kubernetes answers 404: rayjobs.ray.io "{name}" not found' in gone[2]
    (gone,) = cases.call(tmp_path, {"status": status}).values()
    assert gone[0] == 1 and "Kubernetes does not answer (MaxRetryError)" in gone[2]


def attached(folder: Path, *words: str) -> tuple[str, str]:
    """Call `attach` for the run, with a `kubectl` that prints its arguments; return stdout and stderr.

    Args:
        folder: Folder of the project.
        words: Further words of the call.
    """
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "kubectl").write_text('#!/bin/bash\necho "kubectl $*"\n')
    (folder / "bin" / "kubectl").chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(cases.ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    call = [cases.PYTHON, "-m", "launch", "attach", "runs/qwen", *words]
    done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout, done.stderr


def test_what_the_images_have_is_what_the_manifest_says() -> None:
    version = KubeRayConfig(**SECTION).ray_version
    for engine in ("vllm", "sglang"):
        pins = (cases.ROOT / "requirements" / f"gpu-{engine}.txt").read_text().splitlines()
        assert f"ray=={version}" in pins and "aiohttp-cors==0.8.1" in pins  # needed by ray[default], which serves jobs
    assert f"ray=={version}" in (cases.ROOT / "requirements" / "launch.txt").read_text().splitlines()
