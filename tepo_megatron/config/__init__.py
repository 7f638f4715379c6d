"""The one config tree. Every default and every check across fields lives here.

How a config is read and how its errors are told: `config/io.py`. What depends on the model (does tp divide its heads?) is
checked in `actor/layout.py`, what depends on the table of objectives in `losses/`; both before any process is started.
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
    LengthTermConfig,
    RewardConfig,
    RewardTerm,
)
from tepo_megatron.config.rollout import RolloutConfig, ServerConfig
from tepo_megatron.config.run import Config
from tepo_megatron.config.training import OptimizerConfig, SyncConfig, TrainingConfig
from tepo_megatron.config.upkeep import PAPER_TOKENS, Benchmark, CheckpointConfig, EvaluationConfig, LoggingConfig

__all__ = [
    "PAPER_TOKENS",
    "SLICE",
    "AnswerTermConfig",
    "AnyTermConfig",
    "Benchmark",
    "CheckpointConfig",
    "Config",
    "CustomTermConfig",
    "DataConfig",
    "DataSet",
    "EvaluationConfig",
    "FormatTermConfig",
    "HttpTermConfig",
    "LengthTermConfig",
    "LoggingConfig",
    "MegatronConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Precision",
    "RewardConfig",
    "RewardTerm",
    "RolloutConfig",
    "ServerConfig",
    "SyncConfig",
    "TrainingConfig",
]
