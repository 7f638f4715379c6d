"""Check RayJobs against the published schema of their resource, as an API server with strict validation does.

KubeRay's part is written out from its API reference, release 1.4, with the fields that release 1.7 still has: KubeRay 1.4 takes
no others. Kubernetes' part, the pods' templates, comes from the models of its own client.
`python -m tests.launch.kuberay_schema` in .venv-launch reads a JSON list of manifests and prints the faults of each.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from kubernetes import client

_SCALARS = {"str": str, "datetime": str, "int": int, "float": (int, float), "bool": bool, "object": (str, int, dict)}
# Type -> field -> type, in the notation of the client's models.
KUBERAY: dict[str, dict[str, str]] = {
    "RayJob": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "RayJobSpec"},
    "RayJobSpec": {
        "activeDeadlineSeconds": "int", "backoffLimit": "int", "clusterSelector": "dict[str, str]", "entrypoint": "str",
        "entrypointNumCpus": "float", "entrypointNumGpus": "float", "entrypointResources": "str", "jobId": "str",
        "managedBy": "str", "metadata": "dict[str, str]", "rayClusterSpec": "RayClusterSpec", "runtimeEnvYAML": "str",
        "shutdownAfterJobFinishes": "bool", "submissionMode": "str", "submitterConfig": "SubmitterConfig",
        "submitterPodTemplate": "V1PodTemplateSpec", "suspend": "bool", "ttlSecondsAfterFinished": "int",
    },
    "SubmitterConfig": {"backoffLimit": "int"},
    "RayClusterSpec": {
        "enableInTreeAutoscaling": "bool", "headGroupSpec": "HeadGroupSpec", "headServiceAnnotations": "dict[str, str]",
        "managedBy": "str", "rayVersion": "str", "suspend": "bool", "workerGroupSpecs": "list[WorkerGroupSpec]",
    },
    "HeadGroupSpec": {
        "enableIngress": "bool", "headService": "V1Service", "rayStartParams": "dict[str, str]", "serviceType": "str",
        "template": "V1PodTemplateSpec",
    },
    "WorkerGroupSpec": {
        "groupName": "str", "idleTimeoutSeconds": "int", "maxReplicas": "int", "minReplicas": "int", "numOfHosts": "int",
        "rayStartParams": "dict[str, str]", "replicas": "int", "suspend": "bool", "template": "V1PodTemplateSpec",
    },
}  # fmt: skip
REQUIRED = {
    "RayJob": {"apiVersion", "kind", "metadata", "spec"},
    "RayClusterSpec": {"headGroupSpec"},
    "HeadGroupSpec": {"template"},
    "WorkerGroupSpec": {"groupName", "maxReplicas", "minReplicas", "template"},
}
# Quantities may be numbers, which the client's models do not say.
_QUANTITIES = {
    ("V1ResourceRequirements", "limits"), ("V1ResourceRequirements", "requests"), ("V1EmptyDirVolumeSource", "sizeLimit"),
}  # fmt: skip
_QUANTITY = r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?"


def faults(value: Any, kind: str = "RayJob", where: str = "") -> Iterator[str]:
    """Yield the faults of a manifest, each with its path.

    Args:
        value: The manifest, or a part of it.
        kind: Type of that part.
        where: Path of that part.
    """
    if inner := re.fullmatch(r"list\[(.+)\]", kind):
        if isinstance(value, list):
            for i, item in enumerate(value):
                yield from faults(item, inner[1], f"{where}[{i}]")
        else:
            yield f"{where}: {value!r} is no list"
    elif inner := re.fullmatch(r"dict\[str, (.+)\]", kind):
        if isinstance(value, dict):
            for key, item in value.items():
                yield from faults(item, inner[1], f"{where}.{key}")
        else:
            yield f"{where}: {value!r} is no map"
    elif kind == "quantity":
        if isinstance(value, bool) or not re.fullmatch(_QUANTITY, str(value)):
            yield f"{where}: {value!r} is no quantity"
    elif kind in _SCALARS:
        if not isinstance(value, _SCALARS[kind]) or (isinstance(value, bool) and kind != "bool"):
            yield f"{where}: {value!r} is no {kind}"
    elif not isinstance(value, dict):
        yield f"{where}: {value!r} is no {kind}"
    else:
        fields, required = _fields(kind)
        yield from (f"{where}.{name}: is missing in a {kind}" for name in sorted(required - value.keys()))
        for name, item in value.items():
            if name in fields:
                yield from faults(item, fields[name], f"{where}.{name}")
            else:
                yield f"{where}.{name}: a {kind} has no such field"


def _fields(kind: str) -> tuple[dict[str, str], set[str]]:
    """Return field -> type of an object, and its required fields."""
    if kind in KUBERAY:
        return KUBERAY[kind], REQUIRED.get(kind, set())
    model = getattr(client, kind)
    empty = model.__new__(model)  # whose setters refuse to take a required field away
    empty.local_vars_configuration = client.Configuration()
    fields, required = {}, set()
    for attribute, name in model.attribute_map.items():
        fields[name] = model.openapi_types[attribute]
        if (kind, name) in _QUANTITIES:
            fields[name] = "dict[str, quantity]" if fields[name].startswith("dict") else "quantity"
        try:
            setattr(empty, attribute, None)
        except ValueError:
            required.add(name)
    return fields, required


if __name__ == "__main__":
    print(json.dumps([list(faults(manifest)) for manifest in json.load(sys.stdin)]))
