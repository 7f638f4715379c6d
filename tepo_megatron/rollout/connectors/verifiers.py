"""Tasks of verifiers (0.4), whose programs talk to the model through the gateway, and whose reward is that of the sample.

    -> POST {url}/episode {"task": {...}, "base_url": "...", "api_key": "...", "model": "policy"}
    <- {"reward": 1.0}, or {"error": "..."}

`examples/verifiers/server.py` is the other end, in a Python environment of its own: verifiers' packages contradict vLLM's.
"""

import aiohttp

from tepo_megatron.base.processes import raise_open_file_limit
from tepo_megatron.rollout.agent import Agent, AgentTask, openai_agent


class VerifiersError(Exception):
    """An episode that failed in verifiers."""


def play_verifiers(url: str) -> Agent:
    """Return the agent of a server of verifiers. Each row of the data has its task in the column `task`."""
    raise_open_file_limit()

    @openai_agent
    async def play_task(task: AgentTask) -> float:
        if "task" not in task.row:
            raise VerifiersError("the row has no column 'task'; write the data by --export of the server")
        body = {"task": task.row["task"], "base_url": task.base_url, "api_key": task.api_key, "model": task.model}
        # The sample has a deadline; its cancellation hangs up, and so ends the episode.
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(f"{url.rstrip('/')}/episode", json=body, raise_for_status=True) as answer,
        ):
            result = await answer.json()
        if "error" in result:
            raise VerifiersError(result["error"])
        return float(result["reward"])

    return play_task
