"""The text game of `examples/agents/game.py` as an environment of OpenEnv, in the environment that `make openenv` makes.

.venv-openenv/bin/python examples/openenv/server.py --port 8000
"""

import argparse
import re
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

MOST_TURNS = 5
OPERATION = re.compile(r"(\d+)([+-])(\d+)$")
BOXED = re.compile(r"\\boxed\{([^}]*)\}")


class SumAction(Action):
    """A turn of the model."""

    text: str


class SumObservation(Observation):
    """The result of an operation."""

    text: str = ""


class SumEnvironment(Environment[SumAction, SumObservation, State]):
    """One episode of the game."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._answer, self._written, self._state = "", "", State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, *, answer: str = "", **_: Any) -> SumObservation:
        """Begin with a problem that has this answer."""
        self._answer, self._written, self._state = answer, "", State(episode_id=episode_id)
        return SumObservation()

    def step(self, action: SumAction, timeout_s: float | None = None, **_: Any) -> SumObservation:
        """Compute the operation that the model wrote, or judge its result."""
        self._state.step_count += 1
        if not action.text.endswith("=") or self._state.step_count >= MOST_TURNS:
            return SumObservation(done=True, reward=float(BOXED.findall(action.text)[-1:] == [self._answer]))
        operation = OPERATION.search(self._written + action.text[:-1])
        result = "?"
        if operation is not None:
            left, sign, right = operation.groups()
            result = str(int(left) + int(right) if sign == "+" else int(left) - int(right))
        self._written += action.text + result
        return SumObservation(text=result)

    @property
    def state(self) -> State:
        """The number of steps."""
        return self._state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--environments", type=int, default=1024, help="most connections at once: samples of a step")
    args = parser.parse_args()
    app = create_fastapi_app(SumEnvironment, SumAction, SumObservation, max_concurrent_envs=args.environments)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")
