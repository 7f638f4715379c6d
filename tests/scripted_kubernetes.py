"""An API server that keeps RayJobs as they are sent, and shows what a test says of them; no operator, no pods of its own."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

JOBS = "/apis/ray.io/v1/namespaces/lab/rayjobs"
PODS = "/api/v1/namespaces/lab/pods"


class Kubernetes:
    """An API server that keeps RayJobs.

    Attributes:
        jobs: Submitted jobs by name.
        pods: Pods that every listing returns, with the output of each.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Any] = {}
        self.pods: list[dict[str, Any]] = []
        self.printed = ""

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Return the status and the body of a response, an object or text.

        Args:
            method: HTTP method.
            path: Path of the URL.
            body: JSON body of the request. None: no body.
        """
        path, _, query = path.partition("?")
        if method == "POST" and "fieldValidation=Strict" not in query:
            return 400, _failure(400, f"{method} {path}: unknown fields would be dropped")
        if method == "POST" and path == JOBS:
            name = body["metadata"]["name"]
            if name in self.jobs:
                return 409, _failure(409, f'rayjobs.ray.io "{name}" already exists')
            self.jobs[name] = body
            return 201, body
        if path.startswith(f"{JOBS}/"):
            name = path.removeprefix(f"{JOBS}/")
            if name not in self.jobs:
                return 404, _failure(404, f'rayjobs.ray.io "{name}" not found')
            return 200, self.jobs.pop(name) if method == "DELETE" else self.jobs[name]
        if path == PODS:
            return 200, {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": self.pods}
        if path.startswith(f"{PODS}/") and path.endswith("/log"):
            return 200, self.printed
        return 403, _failure(403, f"{method} {path} is forbidden")


def _failure(code: int, message: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": message, "code": code}


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[Kubernetes, Path]]:
    """Yield the API server, and a KUBECONFIG file that names it."""
    kubernetes = Kubernetes()

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or "null")
            status, answer = kubernetes.answer(self.command, self.path, body)
            text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_DELETE = _do

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    path = folder / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    tree = {"apiVersion": "v1", "kind": "Config", "current-context": "x", "clusters": [cluster], "contexts": [context]}
    path.write_text(yaml.safe_dump({**tree, "users": [{"name": "u", "user": {"token": "t"}}]}))
    try:
        yield kubernetes, path
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
