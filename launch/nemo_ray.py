"""Manage jobs on Kubernetes with KubeRay: NeMo-Run's manifest and client, and queries to the cluster afterwards.

Facts of NeMo-Run 0.11.1 that this file depends on: KubeRayJob looks for a cluster when it is constructed, and its `start` only
prints what a dry run would create. Head and workers get the same environment, volumes and pod keys, and `container_kwargs` are
applied last. It only logs failed queries and deletions and continues as if nothing had happened; therefore its client is called
here instead.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes.client.rest import ApiException
from kubernetes.config import ConfigException
from nemo_run.core.execution.kuberay import KubeRayExecutor, KubeRayWorkerGroup
from nemo_run.run.ray.kuberay import KubeRayJob
from urllib3.exceptions import HTTPError

from launch.profile import Cluster
from launch.ray_plan import OF_RAY, PROGRAM, SUPERVISOR, RayJob
from launch.sections import KubeRayConfig, Toleration
from tepo_megatron.errors import ConfigError
from tepo_megatron.utils.escaping import excerpt

_KIND = {"group": "ray.io", "version": "v1", "plural": "rayjobs"}
_ANSWER_SECONDS = 30
_GONE = 404
_MEMORY = "shared-memory"
# Ray reserves memory in /dev/shm for objects, a third of it by default; these jobs have no objects
_START = {"object-store-memory": "100000000"}


@dataclass(kw_only=True)
class _Job(KubeRayJob):
    """NeMo-Run's job, which connects to a cluster only on request, because a dry run needs none."""

    def __post_init__(self) -> None:
        self.user, self.job_name = "", self.name

    def connect(self) -> None:
        """Find the cluster like kubectl does, or as a pod in it. Raise ConfigError."""
        logging.getLogger(KubeRayJob.__module__).disabled = True  # it would log every location that it tries
        try:
            super().__post_init__()
        except ConfigException as e:
            raise ConfigError(f"no Kubernetes: {e}; set KUBECONFIG to the file that kubectl uses") from None
        self.job_name = self.name


def render(job: RayJob) -> str:
    """Return the manifest and the files that a submission would write, without launch's own programs."""
    files = {"rayjob.yaml": _yaml(manifest(job))} | {n: t for n, t in job.files().items() if not n.endswith(".py")}
    return "\n".join(f"#==== {job.folder / name}\n{text.rstrip()}\n" for name, text in files.items())


def submit(job: RayJob) -> str:
    """Submit a job to Kubernetes and return NAMESPACE/NAME. Raise ConfigError with the answer of Kubernetes."""
    body = manifest(job)
    handle = _connected(f"{job.kuberay.namespace}/{job.id}")
    job.write()
    (job.folder / "rayjob.yaml").write_text(_yaml(body))
    with _asking(f"RayJob {job.id} in namespace {job.kuberay.namespace}"):
        handle.api.create_namespaced_custom_object(
            **_KIND, namespace=job.kuberay.namespace, body=body, _request_timeout=_ANSWER_SECONDS,
            field_validation="Strict",  # an older KubeRay would otherwise drop fields that it does not know, with a warning
        )  # fmt: skip
    return f"{job.kuberay.namespace}/{job.id}"


def state(id: str) -> str:
    """Return the state of a RayJob on one line, and one line for each of its pods that does not run. Raise ConfigError."""
    job = _connected(id)
    with _asking(f"RayJob {id}"):
        found = job.api.get_namespaced_custom_object(
            **_KIND, namespace=job.executor.namespace, name=job.name, _request_timeout=_ANSWER_SECONDS
        )
        about = found.get("status", {})
        pods = []
        if cluster := about.get("rayClusterName"):
            pods = job.core_v1_api.list_namespaced_pod(
                job.executor.namespace, label_selector=f"ray.io/cluster={cluster}", _request_timeout=_ANSWER_SECONDS
            ).items
    says = [about.get("jobStatus"), about.get("jobDeploymentStatus"), about.get("reason"), about.get("message")]
    lines = [", ".join(dict.fromkeys(word for word in says if word)) or "not seen by KubeRay's operator yet"]
    return "\n".join([*lines, *(f"pod {pod.metadata.name}: {why}" for pod in pods if (why := _waits(pod.status)))])


def ended(id: str) -> bool:
    """Return whether a RayJob has ended or is gone. Raise ConfigError."""
    job = _connected(id)
    with _asking(f"RayJob {id}"):
        try:
            found = job.api.get_namespaced_custom_object(
                **_KIND, namespace=job.executor.namespace, name=job.name, _request_timeout=_ANSWER_SECONDS
            )
        except ApiException as e:
            if e.status == _GONE:
                return True
            raise
    return found.get("status", {}).get("jobDeploymentStatus") in ("Complete", "Failed")


def worker_pod(id: str, node: str | None) -> str:
    """Return the name of the pod of a machine.

    Args:
        node: Index of the machine, in the order of the addresses, as on_ray.py counts. None: the first.
    Raises:
        ConfigError: There is no such pod, or it does not run.
    """
    job = _connected(id)
    with _asking(f"RayJob {id}"):
        found = job.api.get_namespaced_custom_object(
            **_KIND, namespace=job.executor.namespace, name=job.name, _request_timeout=_ANSWER_SECONDS
        )
        cluster = found.get("status", {}).get("rayClusterName", "")
        selector = f"ray.io/cluster={cluster},ray.io/node-type=worker"
        pods = job.core_v1_api.list_namespaced_pod(
            job.executor.namespace, label_selector=selector, _request_timeout=_ANSWER_SECONDS
        ).items
    running = sorted((str(pod.status.pod_ip), pod.metadata.name) for pod in pods if pod.status.phase == "Running")
    index = int(node) if node is not None and node.isdigit() else None if node is not None else 0
    if index is None or index >= len(running):
        raise ConfigError(f"--node {node or 0}: {len(running)} machines of RayJob {id} run; give an index from 0 below that")
    return str(running[index][1])


def submitter_output(id: str, lines: int) -> str:
    """Return the output of the job's submitter, which is the output of on_ray.py.

    Raises:
        ConfigError: The cluster does not answer, or refuses.
    """
    job = _connected(id)
    with _asking(f"the pods of RayJob {id}"):
        pods = job.core_v1_api.list_namespaced_pod(
            job.executor.namespace, label_selector=f"job-name={job.name}", _request_timeout=_ANSWER_SECONDS
        ).items
        texts = [
            job.core_v1_api.read_namespaced_pod_log(
                pod.metadata.name, job.executor.namespace, tail_lines=lines, _request_timeout=_ANSWER_SECONDS,
                _preload_content=False,  # otherwise the text is the repr of bytes
            ).data.decode(errors="replace")
            for pod in pods
            if pod.status.phase != "Pending"
        ]  # fmt: skip
    return "\n".join(text.rstrip() for text in texts)


def cancel(id: str) -> None:
    """Delete a RayJob and its pods. Raise ConfigError."""
    job = _connected(id)
    with _asking(f"RayJob {id}"):
        job.api.delete_namespaced_custom_object(
            **_KIND, namespace=job.executor.namespace, name=job.name, _request_timeout=_ANSWER_SECONDS
        )


def manifest(job: RayJob) -> dict[str, Any]:
    """Return NeMo-Run's RayJob, completed with options that NeMo-Run lacks: placement, labels, devices and capabilities."""
    with contextlib.redirect_stdout(io.StringIO()):
        body = _Job(name=job.id, executor=_executor(job)).start(command=job.entrypoint, dryrun=True)
    body = json.loads(json.dumps(body))  # a deep copy, because head and workers share lists
    del body["spec"]["runtimeEnvYAML"]  # null
    (workers,) = body["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    template, section = workers["template"], job.kuberay
    _place(template, section, section.node_selector, section.tolerations)
    _place(
        body["spec"]["rayClusterSpec"]["headGroupSpec"]["template"],
        section,
        section.head_node_selector,
        section.head_tolerations,
    )
    submitter = {"spec": {"restartPolicy": "Never", "containers": [_submitter(job)]}}
    if _place(submitter, section, section.head_node_selector, section.head_tolerations):
        body["spec"]["submitterPodTemplate"] = submitter
    if job.resumes and section.grace_seconds:
        _add_grace(template, job.before_the_end(SUPERVISOR), section.grace_seconds)
        _add_grace(
            body["spec"]["rayClusterSpec"]["headGroupSpec"]["template"], job.before_the_end(PROGRAM), section.grace_seconds
        )
    if section.labels:
        body["metadata"]["labels"] = dict(section.labels)  # where Kueue looks
    if section.annotations:
        template.setdefault("metadata", {})["annotations"] = dict(section.annotations)
    pod = template["spec"]
    if section.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if section.capabilities:
        pod["containers"][0]["securityContext"] = {"capabilities": {"add": list(section.capabilities)}}
    for kind in ("requests", "limits"):
        pod["containers"][0]["resources"][kind] |= section.devices
    return body


def _place(template: dict[str, Any], section: KubeRayConfig, selector: dict[str, str], tolerations: list[Toleration]) -> bool:
    """Add to a pod's template what decides on which machine it runs, and when. Return whether there was anything to add."""
    given = (asdict(toleration).items() for toleration in tolerations)
    keys = {
        "nodeSelector": dict(selector),
        "tolerations": [{key: value for key, value in items if value is not None} for items in given],
        "schedulerName": section.scheduler,
        "priorityClassName": section.priority_class,
    }
    added = {key: value for key, value in keys.items() if value}
    template["spec"] |= added
    if section.labels:
        template.setdefault("metadata", {})["labels"] = dict(section.labels)
    return bool(added or section.labels)


def _add_grace(template: dict[str, Any], script: str, seconds: int) -> None:
    """Have a pod run a script before NeMo-Run's `ray stop`, when it is to be ended.

    Args:
        seconds: Seconds until the pod is killed.
    """
    template["spec"]["terminationGracePeriodSeconds"] = seconds
    before = template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]
    before["command"] = ["bash", "-c", f"{script}; {before['command'][-1]}"]


def _submitter(job: RayJob) -> dict[str, Any]:
    """Return the container of the pod that submits the job. KubeRay adds its command; the resources are KubeRay's defaults."""
    assert job.cluster.container is not None, "checked before"
    resources = {"requests": {"cpu": "500m", "memory": "200Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
    return {"name": "ray-job-submitter", "image": job.cluster.container.image, "resources": resources}


def _executor(job: RayJob) -> KubeRayExecutor:
    cluster, section = job.cluster, job.kuberay
    assert cluster.container is not None, "checked before"
    names = {claim: f"claim-{i}" for i, claim in enumerate(section.claims)}  # a volume's name has no dots
    mounts = [{"name": names[claim], "mountPath": path} for claim, path in section.claims.items()]
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": claim}} for claim, name in names.items()]
    workers = KubeRayWorkerGroup(
        group_name="machines", replicas=job.machines, gpus_per_worker=cluster.gpus_per_node or None,
        cpu_requests=section.cpu, cpu_limits=section.cpu, memory_requests=section.memory, memory_limits=section.memory,
    )  # fmt: skip
    who = {"runAsUser": section.user, "runAsGroup": section.group, "fsGroup": section.group}
    who = {key: number for key, number in who.items() if number is not None}
    return KubeRayExecutor(
        namespace=section.namespace,
        ray_version=section.ray_version,
        image=cluster.container.image,
        head_cpu=section.head_cpu,
        head_memory=section.head_memory,
        ray_head_start_params={"num-cpus": "0"} | _START,
        ray_worker_start_params=dict(_START),
        worker_groups=[workers],
        volumes=[*volumes, {"name": _MEMORY, "emptyDir": {"medium": "Memory"}}],
        volume_mounts=[*mounts, {"name": _MEMORY, "mountPath": "/dev/shm"}],
        container_kwargs={"env": _environment(cluster, section.secret, job.home)},
        spec_kwargs={"securityContext": who} if who else {},
    )


def _environment(cluster: Cluster, secret: str | None, home: Path) -> list[dict[str, Any]]:
    """Return the environment in Kubernetes' form, where $ begins a reference and $$ stands for itself."""
    values = OF_RAY | cluster.environment | cluster.network.variables | cluster.cache_variables(home)
    plain: list[dict[str, Any]] = [{"name": name, "value": value.replace("$", "$$")} for name, value in values.items()]
    return plain + [{"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}} for name in cluster.secrets]


def _connected(id: str) -> _Job:
    namespace, _, name = id.partition("/")
    job = _Job(name=name, executor=KubeRayExecutor(namespace=namespace))
    job.connect()
    return job


@contextlib.contextmanager
def _asking(what: str) -> Iterator[None]:
    """Turn errors of the cluster and of the connection to it into ConfigErrors."""
    try:
        yield
    except ApiException as e:
        try:
            why = json.loads(e.body)["message"]
        except (TypeError, ValueError, KeyError):
            why = e.reason
        raise ConfigError(f"{what}: Kubernetes answers {e.status}: {excerpt(str(why), 500)}") from None
    except HTTPError as e:
        raise ConfigError(
            f"{what}: Kubernetes does not answer ({type(e).__name__}); is it the cluster of KUBECONFIG?"
        ) from None


def _waits(status: Any) -> str | None:
    """Return why a pod does not run; None if it runs."""
    for container in status.container_statuses or []:
        if container.state.waiting is not None:
            return f"{container.state.waiting.reason}: {container.state.waiting.message or ''}".rstrip(": ")
    if status.phase == "Running":
        return None
    unmet = [c for c in status.conditions or [] if c.status == "False" and c.message]
    return f"{status.phase}, {unmet[0].reason}: {unmet[0].message}" if unmet else str(status.phase)


def _yaml(body: dict[str, Any]) -> str:
    # do not fold lines, because the folds would depend on the length of the run's path
    return yaml.safe_dump(body, sort_keys=False, width=sys.maxsize)
