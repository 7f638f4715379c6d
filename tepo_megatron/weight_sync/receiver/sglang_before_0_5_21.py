"""Give SGLang 0.5.19 and 0.5.20 what this package asks of 0.5.21 and later. Runs inside the server.

Both releases load tensors without a session of updates, so its two routes answer and do nothing. 0.5.19 also has the choices of
backends in another module, no CPU branch in its hash of (seed, position, column), and no option for the size of sampling masks,
which it does not limit.
"""

import importlib.metadata
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

MASK_OPTION = "--sampling-mask-max-tokens"
SESSION_ROUTES = ("/begin_weight_update", "/end_weight_update")


def release() -> tuple[int, ...]:
    """Return the release of the installed SGLang, (0, 5, 23) for example."""
    return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("sglang"))[:3])


def backend_choices(installed: Sequence[int]) -> ModuleType:
    """Return the module with the choices of attention backends."""
    if tuple(installed) < (0, 5, 20):
        from sglang.srt import server_args

        return server_args
    from sglang.srt.arg_groups import choices

    return choices


def known_arguments(argv: Sequence[str], installed: Sequence[int]) -> list[str]:
    """Return the arguments without those that the release does not know."""
    found = list(argv)
    if tuple(installed) < (0, 5, 20) and MASK_OPTION in found:
        place = found.index(MASK_OPTION)
        del found[place : place + 2]
    return found


def use_hash_on_cpu(hashed: Callable[..., Any], installed: Sequence[int]) -> None:
    """Have the sampler use a hash that runs on a CPU."""
    if tuple(installed) < (0, 5, 20):
        from sglang.srt.layers import sampler

        sampler.murmur_hash32 = hashed


def add_session_routes(app: Any, installed: Sequence[int]) -> None:
    """Add the two routes of a session of updates, which need the key as the other routes do."""
    if tuple(installed) < (0, 5, 21):
        for path in SESSION_ROUTES:
            app.add_api_route(path, _no_session, methods=["POST"])


async def _no_session() -> dict[str, object]:
    return {"success": True, "message": "this release has no sessions of updates"}
