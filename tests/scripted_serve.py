"""`tepo serve` with the scripted server in the place of an engine: python -m tests.scripted_serve CONFIG HOST"""

import sys
from collections.abc import Callable

from tepo_megatron.config.io import load_config
from tepo_megatron.engines import engines
from tepo_megatron.engines.engine_api import EngineApi
from tepo_megatron.engines.servers import slot
from tepo_megatron.engines.servers.serve import serve
from tests.scripted_api import ScriptedApi


def main(config: str, host: str, make_api: Callable[[], EngineApi]) -> None:
    """Serve with `make_api` in the place of vLLM."""
    engines.ENGINES["vllm"] = make_api  # type: ignore[index]
    cfg = load_config(config)
    launch = engines.launch_of(
        cfg.model, cfg.rollout, cfg.sync, platform=cfg.platform, max_model_len=cfg.served_tokens, seed=cfg.seed, host=host
    )
    serve(cfg.rollout, launch, None, lambda text: print(text, flush=True))


if __name__ == "__main__":
    slot.BACKOFF_SECONDS = 0.05
    main(sys.argv[1], sys.argv[2], ScriptedApi)
