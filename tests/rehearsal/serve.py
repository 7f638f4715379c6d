"""`tepo serve` with the rehearsal's servers in the place of vLLM: python -m tests.rehearsal.serve CONFIG HOST"""

import sys
from collections.abc import Mapping
from pathlib import Path

from tepo_megatron.config import ServerConfig
from tepo_megatron.engines.engine_api import LaunchSpec
from tepo_megatron.engines.vllm import VllmApi
from tests.scripted_serve import main


class RehearsalApi(VllmApi):
    def command(self, cfg: ServerConfig, launch: LaunchSpec, port: int) -> list[str]:
        return [sys.executable, "-m", "tests.rehearsal.server", str(port), launch.host, str(launch.model_path)]

    def environment(self, cfg: ServerConfig, launch: LaunchSpec, inherited: Mapping[str, str], key: str) -> dict[str, str]:
        root = str(Path(__file__).resolve().parents[2])
        return super().environment(cfg, launch, inherited, key) | {"PYTHONPATH": root}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], RehearsalApi)
