"""The one config tree. Every default and every check across fields lives here.

`config/io.py` reads configs and explains their errors. `actor/layout.py` checks what depends on the model (does tp divide its
heads?), and `losses/` what depends on the table of objectives; both before any process is started.
"""

from tepo_megatron.config.data import SLICE, DataConfig, DataSet
from tepo_megatron.config.megatron import MegatronConfig
from tepo_megatron.config.model import ModelConfig, ParallelConfig, Precision
from tepo_megatron.config.objective import ObjectiveConfig
from tepo_megatron.config.reward import (
    AnswerTermConfig,
    AnyTermConfig,
    CustomTermConfig,
    FormatTermConfig,
    HttpTermConfig,
    JudgeTermConfig,
    LengthTermConfig,
    RewardConfig,
    RewardTerm,
)
from tepo_megatron.config.rollout import DYNAMIC_SAMPLING_ROUNDS, LimitsConfig, RolloutConfig
from tepo_megatron.config.run import Config
from tepo_megatron.config.server import AnyServer, AnyServerConfig, RendezvousServerConfig, ServerConfig, UrlServerConfig
from tepo_megatron.config.sync import (
    AnyTransportConfig,
    GroupTransportConfig,
    IpcTransportConfig,
    ShmTransportConfig,
    SyncConfig,
)
from tepo_megatron.config.training import OptimizerConfig, SftConfig, TrainingConfig
from tepo_megatron.config.upkeep import PAPER_TOKENS, Benchmark, CheckpointConfig, EvaluationConfig, LoggingConfig

__all__ = [
    "DYNAMIC_SAMPLING_ROUNDS", "PAPER_TOKENS", "SLICE", "AnswerTermConfig", "AnyServer", "AnyServerConfig", "AnyTermConfig",
    "AnyTransportConfig", "Benchmark", "CheckpointConfig", "Config", "CustomTermConfig", "DataConfig", "DataSet",
    "EvaluationConfig", "FormatTermConfig", "GroupTransportConfig", "HttpTermConfig", "IpcTransportConfig",
    "JudgeTermConfig", "LengthTermConfig", "LimitsConfig", "LoggingConfig", "MegatronConfig", "ModelConfig", "ObjectiveConfig",
    "OptimizerConfig", "ParallelConfig", "Precision", "RendezvousServerConfig", "RewardConfig", "RewardTerm", "RolloutConfig",
    "ServerConfig", "SftConfig", "ShmTransportConfig", "SyncConfig", "TrainingConfig", "UrlServerConfig",
]  # fmt: skip
