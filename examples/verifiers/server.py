"""Play the tasks of a verifiers taskset for a run, in the environment that `make verifiers` makes: docs/agents.md.

    .venv-verifiers/bin/python examples/verifiers/server.py sums --export .cache/sums.jsonl      # its tasks, as data.train
    .venv-verifiers/bin/python examples/verifiers/server.py sums --port 8001

POST /episode takes {"task": ..., "base_url": ..., "api_key": ..., "model": ...} and returns {"reward": ...} or {"error": ...}.
"""

import argparse
import json
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.clients import ModelContext


class Player:
    """A single-agent environment, which plays one episode for each request."""

    def __init__(self, taskset: str, harness: str) -> None:
        agent = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
        config = {"taskset": {"id": taskset}, "agent": agent}
        self.env = vf.load_environment(vf.env_config_type(taskset).model_validate(config))
        self._task_type = type(self.env.taskset).task_type()

    async def serving(self, app: web.Application) -> AsyncIterator[None]:
        """Hold what episodes share."""
        async with self.env.serving():
            yield

    async def episode(self, request: web.Request) -> web.Response:
        """Play a task with the model of one sample."""
        body = await request.json()
        try:
            data = self._task_type.data_type().model_validate(body["task"])
        except ValueError as e:
            return web.json_response({"error": f"the task does not fit the taskset: {e}"})
        # Clients of verifiers read their key from a variable; programs of a harness inherit none whose name has API_KEY in it.
        variable = f"TEPO_API_KEY_{secrets.token_hex(8)}"
        os.environ[variable] = body["api_key"]
        try:
            client = vf.EvalClientConfig(base_url=body["base_url"], api_key_var=variable)
            (slot,) = self.env.slots(self._task_type(data, self.env.config.taskset.task))
            episode = await self.env.run_slot(slot, ModelContext(model=body["model"], client=client))
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            return web.json_response({"error": "; ".join(f"{error.type}: {error.message}" for error in errors)})
        return web.json_response({"reward": sum(trace.reward for trace in episode.traces)})

    def rows(self) -> list[str]:
        """Return the tasks as rows of a dataset. Verifiers grades, so that the answers are of no use."""
        rows = []
        for task in self.env.taskset:
            prompt = task.data.prompt if isinstance(task.data.prompt, str) else f"task {task.data.idx}"
            rows.append(json.dumps({"prompt": prompt, "answer": "0", "task": task.data.model_dump(mode="json")}))
        return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("taskset")
    parser.add_argument("--harness", default="null")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--export", type=Path)
    args = parser.parse_args()
    player = Player(args.taskset, args.harness)
    if args.export is not None:
        args.export.write_text("".join(f"{row}\n" for row in player.rows()))
    else:
        app = web.Application(client_max_size=64 << 20)
        app.cleanup_ctx.append(player.serving)
        app.router.add_post("/episode", player.episode)
        web.run_app(app, host="127.0.0.1", port=args.port, handler_cancellation=True, access_log=None, print=None)
