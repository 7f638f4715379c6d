"""Section `sync`: deliver the trained weights to the inference servers, and compare the engine's log-probs with the actor's."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from tepo_megatron.config.fields import NonNegative, Positive, PositiveFloat, config, join_seconds, without_nulls
from tepo_megatron.config.model import ModelConfig, ParallelConfig
from tepo_megatron.config.rollout import RolloutConfig


@config
class ShmTransportConfig:
    """Send weights as safetensors files in a folder: one file per bucket and owner of a pipeline stage."""

    # The transport.
    type: Literal["shm"] = "shm"
    # Folder of the weight files. Ranks and servers on several machines need a file system that all of them share, for this run
    # alone: files that killed runs left in it are removed. null: /dev/shm, separately on each machine of the ranks.
    folder: str | None = None


@config
class GroupTransportConfig:
    """Broadcast weights to the ranks of all servers in process groups of their own: gloo on CPUs, NCCL on GPUs."""

    # The transport.
    type: Literal["group"]
    # IPv4 address of rank 0's machine at which ranks and servers form the groups. The port that is opened there asks for no
    # key. null: the address from which rank 0 reaches the servers.
    address: str | None = None
    # Seconds until one round of buckets has arrived at all servers. A server that takes longer in three attempts ends the run.
    # Limit since a round of `sync.bucket_mib` began: 512 MiB take 5 s on a network of 1 Gbit/s; then the groups are formed
    # again
    timeout_seconds: PositiveFloat = 30.0


@config
class IpcTransportConfig:
    """Let servers that the run starts on the same machine map the senders' buckets.

    On GPUs through CUDA IPC, so the GPUs must reach each other's memory; on CPUs through an unnamed file in memory.
    """

    # The transport.
    type: Literal["ipc"]


AnyTransportConfig = ShmTransportConfig | GroupTransportConfig | IpcTransportConfig


def _delta_mode(value: Any) -> Any:
    """Return the mode that a boolean stands for, as in earlier releases; anything else as it is."""
    return {True: "layers", False: "none"}[value] if isinstance(value, bool) else value


def _prepared(value: Any) -> Any:
    """Return a transport as a section: a plain string is its type, a section without `type` is `shm`; null keys are removed."""
    if isinstance(value, str):
        return {"type": value}
    return {"type": "shm"} | without_nulls(value) if isinstance(value, dict) else value


TRANSPORTS: Mapping[str, type] = {"shm": ShmTransportConfig, "group": GroupTransportConfig, "ipc": IpcTransportConfig}


def _variant(value: Any) -> str | None:
    """Return the tag of the variant that a section or an instance is; None if there is no such transport."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{TRANSPORTS[kind].__name__}>" if isinstance(kind, str) and kind in TRANSPORTS else None


TransportConfig = Annotated[
    Annotated[ShmTransportConfig, Tag("<ShmTransportConfig>")]
    | Annotated[GroupTransportConfig, Tag("<GroupTransportConfig>")]
    | Annotated[IpcTransportConfig, Tag("<IpcTransportConfig>")],
    Discriminator(
        _variant,
        custom_error_type="transport",
        custom_error_message="must be one of shm, group and ipc, or a section with one of these as its `type`",
    ),
    BeforeValidator(_prepared),
]


@config
class SyncConfig:
    """Delivery of the weights to the inference servers, and the gate on the mismatch between engine and actor."""

    # How weights reach the servers. A plain string is short for a section with that `type`.
    transport: TransportConfig = Field(default_factory=ShmTransportConfig)
    # Format of the decoder's linear layers on the way to the servers. fp8: blockwise e4m3, which takes half the bytes of bf16;
    # the servers then hold an FP8 model (the output of `tools/convert.py export --fp8-blockwise`; servers of
    # rollout.server.urls must be started with it). FP8 log-probs differ more from the actor's, so choose sync.max_logprob_diff
    # accordingly.
    quantize: Literal["none", "fp8"] = "none"
    # MiB of one round of buckets, over all owners together. Shared memory (or the senders' memory) holds two rounds.
    bucket_mib: Positive = 512
    # What a delivery leaves out. layers: parameters whose bytes did not change since the last delivery (decoder layers as a
    # whole). Servers that lack the last delivery receive all. The engine stops sampling before the first bucket is written.
    # true means layers, false none.
    delta: Annotated[Literal["none", "layers"], BeforeValidator(_delta_mode)] = "none"
    # Number of steps between deliveries that are verified at both ends; 0: never. In a verified delivery the engine checks the
    # CRC-32 of each tensor that arrives, and all servers report checksums of the parameters that they serve: these must be
    # equal on all servers, and must change where the parameter did. vLLM on a CPU reports none for linear layers.
    verify_every: NonNegative = 0
    # Largest mean absolute difference, in nats, between the log-probs of engine and actor over the tokens of a step. Above it
    # the run stops. Each token is compared under the weights that sampled it. Each server is checked separately as well, with
    # a margin where it has few tokens.
    max_logprob_diff: PositiveFloat = 0.05
    # Maximum number of response tokens per server and version that a step compares where the comparison costs an additional
    # forward pass: for tokens of older weights (rollout.max_staleness), and with training.old_logprobs=rollout. null: all.
    compared_tokens: Positive | None = None

    @property
    def shared_folder(self) -> str | None:
        """Return the folder of transport `shm`; None for shared memory and for the other transports."""
        return self.transport.folder if isinstance(self.transport, ShmTransportConfig) else None


def check_transport(sync: SyncConfig, rollout: RolloutConfig, parallel: ParallelConfig, platform: str) -> None:
    """Check that the transport reaches the servers, and within the other time limits. Raises ValueError."""
    transport, server = sync.transport, rollout.server
    if isinstance(transport, GroupTransportConfig):
        _check_group(transport, rollout, parallel, platform)
    remote = server.remote and not rollout.only and rollout.replay is None
    if remote and isinstance(transport, IpcTransportConfig):
        raise ValueError(
            "sync.transport=ipc shares memory of this machine's processes, which servers that others start (rollout.server."
            "urls or rollout.server.rendezvous) may not see; use sync.transport=group, or shm with sync.transport.folder"
        )
    if remote and not rollout.colocate and isinstance(transport, ShmTransportConfig) and transport.folder is None:
        raise ValueError(
            "sync.transport.folder is not set, and shared memory does not reach servers of other machines; set it to a folder "
            "that the trainer shares with the servers of rollout.server.urls or rollout.server.rendezvous (/dev/shm where they "
            "are on one machine), or use sync.transport=group"
        )


def _check_group(transport: GroupTransportConfig, rollout: RolloutConfig, parallel: ParallelConfig, platform: str) -> None:
    """Check transport `group`; see `check_transport`."""
    seconds, silent = transport.timeout_seconds, rollout.server.heartbeat_timeout
    if seconds >= silent:
        raise ValueError(
            f"sync.transport.timeout_seconds={seconds:g} must be below rollout.server.heartbeat_timeout={silent:g}: a server "
            "that waits for weights may not answer about its health"
        )
    if join_seconds(platform) >= parallel.stuck_seconds:
        raise ValueError(
            f"parallel.timeout_seconds={parallel.timeout_seconds:g}: with sync.transport=group on {platform}, 0.9 of it must "
            f"exceed the {join_seconds(platform):g} s that ranks and servers may take to form the groups; a rank that still "
            "forms a group would count as stuck. Raise it"
        )
    if rollout.colocate and platform == "cuda":
        raise ValueError(
            "sync.transport=group with rollout.colocate=true: NCCL has no group of two processes on one GPU; use "
            "sync.transport=ipc on one machine, or shm"
        )


def check_quantize(sync: SyncConfig, rollout: RolloutConfig, model: ModelConfig, platform: str) -> None:
    """Check the requirements of servers with an FP8 model. Raises ValueError."""
    if sync.quantize == "none":
        return
    if platform == "cpu":
        raise ValueError(
            "sync.quantize=fp8 needs platform=cuda: on CPUs both engines compute blockwise FP8 with AMX alone, which was "
            "not tried; set it to none"
        )
    if rollout.engine == "torch":
        raise ValueError(
            "sync.quantize=fp8 with rollout.engine=torch: it computes in bf16 or fp32 alone; set sync.quantize=none, or "
            "rollout.engine to vllm or sglang"
        )
    precision = rollout.server.precision or model.dtype
    if precision != "bf16":
        raise ValueError(
            f"sync.quantize=fp8 needs the parameters that are not quantized to be served in bf16, not {precision}; set "
            "rollout.server.precision=bf16, or sync.quantize=none"
        )
    if rollout.only:
        raise ValueError(
            "sync.quantize=fp8 has servers wait for their first weights, and rollout.only=true sends none; set it to none"
        )
