"""Section `rollout`: sampling of the responses that a step learns from."""

from typing import Annotated, Literal

from pydantic import Field

from tepo_megatron.base.limits import MOST_CANDIDATES, MOST_MASKED
from tepo_megatron.config.fields import NonNegative, Positive, PositiveFloat, config
from tepo_megatron.config.server import AnyServer, ServerConfig, UrlServerConfig, check_engine_size
from tepo_megatron.config.training import TrainingConfig

# Default of rollout.max_generation_rounds under dynamic sampling. DAPO's public recipe gives up after 10 generation batches
# (verl, recipe/dapo/run_dapo_qwen2.5_32b.sh: max_num_gen_batches=10). Each of them has 3 times the prompts of a step, and too
# few groups end the run. Here each round samples one prompt for each missing group, and the step trains on the groups that
# were found.
DYNAMIC_SAMPLING_ROUNDS = 10


@config
class LimitsConfig:
    """Limits of a sample that `rollout.function` makes. A sample that exceeds one is lost; the run goes on."""

    # Maximum number of turns of the model.
    turns: Positive = 128
    # Maximum number of tool calls: calls of `append`, or tool calls that the model wrote through the gateway.
    tool_calls: Positive = 256
    # Seconds after which the sample is cut, so that it does not hold up its step.
    # Limit since a sample of `rollout.function` began: 32k tokens take half an hour on a full server, and tools as long; then
    # it is lost
    seconds: PositiveFloat = 7200.0


@config
class RolloutConfig:
    """Sampling of each step's rollout batch."""

    # Inference engine that samples the responses. torch: our own server, which needs no other package than the trainer; slow.
    engine: Literal["vllm", "sglang", "torch"] = "vllm"
    # Number of inference servers. Each holds a copy of the model.
    servers: Positive = 1
    # Smallest number of servers with which the run goes on; with fewer it fails.
    min_servers: Positive = 1
    # Number of steps by which the weights that sampled a token may be older than the weights that learn from it. 0: sampling
    # and training alternate. k: sampling runs concurrently with training, up to k steps ahead (objective.correction weighs the
    # difference). Each rank then keeps k + 1 copies of its weights in host memory, with which tokens of older weights are
    # compared (sync.max_logprob_diff).
    max_staleness: NonNegative = 0
    # Treatment of responses that are being sampled when new weights arrive. finish: wait for them. continue: keep their tokens
    # and go on sampling under the new weights, in the next step too if rollout.oversample leaves them over. restart: discard
    # them and sample their groups again.
    on_weight_update: Literal["finish", "continue", "restart"] = "finish"
    # Let trainer and engine share the devices: while one of them works, the other has released its memory. With
    # rollout.server.rendezvous, `tepo serve` keeps servers on every machine of the ranks.
    colocate: bool = False
    # Number of groups (prompts) in a rollout batch.
    prompts_per_step: Positive = 64
    # Number of responses to each prompt, the group within which advantages are computed.
    samples_per_prompt: Annotated[int, Field(ge=2, strict=True)] = 8
    # Sampling temperature. It also scales the logits of the actor's and the reference policy's log-probs. vLLM raises values
    # below 0.01 to 0.01 without notice, so they are refused.
    temperature: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] = 1.0
    # Sample each token among the k most likely ones. The old, new and reference log-probs and the entropies are then those of
    # the same tokens, renormalized. Up to 64, engines return the ids of these tokens with each sampled token. -1: no limit.
    top_k: Annotated[int, Field(ge=-1, strict=True)] = -1
    # Sample each token among the most likely ones whose probabilities add up to this; top_k applies first. vLLM counts the
    # probabilities that top_k left, SGLang those of the whole vocabulary. Without top_k, the actor finds the tokens itself,
    # at most 256 of them, in a pass of its own (metrics truncation/*). 1: no limit.
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    # Maximum number of tokens of a response. Sampling stops there.
    max_response_tokens: Positive = 8192
    # path/to/file.py:name of an async function that makes each sample, for example in several turns with tools
    # (`rollout/conversation.py`). All tokens that it adds to the prompt count towards rollout.max_response_tokens, and each
    # turn is one request of rollout.server.concurrency. null: each sample is one response.
    function: str | None = None
    # Limits of each sample that rollout.function makes.
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    # Largest share of the samples of a step or an evaluation that rollout.function may lose (it raised, timed out, or exceeded
    # a limit). With more the run ends. Advantages are those of the rest of a group; a group with fewer than two samples left is
    # dropped.
    max_failed_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.2
    # Token ids that end a response, in addition to the end-of-sequence tokens of the model's config.json and tokenizer.
    stop_token_ids: list[NonNegative] = Field(default_factory=list)
    # Make the actor use the experts that the engine's routers chose for each token, in every pass except those of the reference
    # policy, so that its log-probs are those of the network that sampled. Engines and models that cannot return the choice are
    # refused (`engines/engines.py`).
    replay_experts: bool = False
    # Drop groups whose responses are all right or all wrong (by the score before shaping).
    filter_uniform_groups: bool = True
    # Maximum number of rounds in which a step samples prompts: the first one, and further ones that replace dropped groups.
    # null: 10 under objective.dynamic_sampling, else 1.
    max_generation_rounds: Positive | None = None
    # Number of prompts to sample per group that is needed. Sampling ends when enough groups are complete. The longest responses
    # finish last, so they are learned from less often, and timing decides which ones.
    oversample: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    # Keep the rollouts of each step in `rollouts/` of the run's folder.
    record: bool = False
    # Folder of rollouts that another run recorded, to learn from them again. No engine is started, and nothing is sampled or
    # evaluated.
    replay: str | None = None
    # Only sample, grade and record with the weights of model.path. Nothing is trained.
    only: bool = False
    # The inference servers.
    server: AnyServer = Field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        if self.min_servers > self.servers:
            raise ValueError(f"min_servers={self.min_servers} exceeds servers={self.servers}; lower it or start more")
        if self.colocate:
            self._check_colocation()
        self._check_truncation()
        check_engine_size(self.engine, self.server)
        if self.replay_experts and self.engine == "torch":
            raise ValueError(
                "engine=torch with replay_experts=true: it does not return the experts that it chose; set replay_experts to "
                "false, or engine to vllm or sglang"
            )
        if self.replay_experts and self.function is not None:
            raise ValueError(
                f"replay_experts=true and function={self.function}: the turns of a sample are requests of their own, whose "
                "experts are not joined; set replay_experts to false, or function to null"
            )
        if self.on_weight_update != "finish" and self.max_staleness == 0:
            raise ValueError(
                f"on_weight_update={self.on_weight_update}: no response is being sampled when new weights arrive while "
                "max_staleness=0; set max_staleness to 1 or more, or on_weight_update to finish"
            )
        if isinstance(self.server, UrlServerConfig) and len(self.server.urls) != self.servers:
            raise ValueError(
                f"server.urls names {len(self.server.urls)} servers, not servers={self.servers}; set that to their number"
            )

    @property
    def truncates(self) -> bool:
        """Return whether the distribution that is sampled from is truncated."""
        return self.top_k != -1 or self.top_p < 1

    @property
    def engine_returns_masks(self) -> bool:
        """Return whether the engine is asked for the sampling mask of each token."""
        return 0 < self.top_k <= MOST_MASKED

    def _check_truncation(self) -> None:
        if self.top_k in (0, 1):
            raise ValueError(
                f"top_k={self.top_k}: nothing can be learned from a choice among fewer than two tokens; set top_k to 2 or "
                "more, or to -1 for no limit"
            )
        if not self.truncates:
            return
        if self.top_k > MOST_CANDIDATES:
            raise ValueError(
                f"top_k={self.top_k}: the actor finds at most {MOST_CANDIDATES} tokens, so its log-probs would be those of "
                f"another distribution; set top_k to 2 .. {MOST_CANDIDATES}, or to -1 for no limit"
            )
        if self.replay is not None or self.engine_returns_masks:
            return
        if self.max_staleness:
            raise ValueError(
                f"max_staleness={self.max_staleness} with top_k={self.top_k} and top_p={self.top_p:g}: the engine returns the "
                f"tokens that it chose from up to top_k={MOST_MASKED}, and the actor's newer weights would find others; set "
                f"top_k to 2 .. {MOST_MASKED}, or max_staleness to 0"
            )
        if self.engine == "sglang":
            raise ValueError(
                f"engine=sglang with top_k={self.top_k} and top_p={self.top_p:g}: SGLang gives log-probs of the truncated "
                f"distribution only with the tokens that it chose from, and these up to top_k={MOST_MASKED}; set top_k to 2 .. "
                f"{MOST_MASKED}, or engine to vllm"
            )

    def _check_colocation(self) -> None:
        if self.max_staleness:
            raise ValueError(
                f"max_staleness={self.max_staleness} samples while training goes on, and with colocate=true they take turns; "
                "set max_staleness to 0, or colocate to false"
            )
        if isinstance(self.server, UrlServerConfig):
            raise ValueError(
                "colocate=true has servers pause while the trainer works, and whoever starts those of server.urls is not "
                "informed of it; keep them with `tepo serve` on the ranks' machines, and set server.rendezvous instead"
            )
        if self.replay is not None or self.only:
            one = "only=true trains nothing" if self.only else f"replay={self.replay} starts no engine"
            raise ValueError(f"colocate=true has trainer and engine take turns, and {one}; remove one of them")


def check_batch(rollout: RolloutConfig, training: TrainingConfig) -> None:
    """Check that minibatches fit into the rollout batch. Raises ValueError."""
    if training.minibatch_prompts > rollout.prompts_per_step:
        raise ValueError(
            f"training.minibatch_prompts={training.minibatch_prompts} exceeds "
            f"rollout.prompts_per_step={rollout.prompts_per_step}; lower the first or raise the second"
        )


def check_stream(rollout: RolloutConfig, training: TrainingConfig) -> None:
    """Check that minibatches can be trained while others are sampled. Raises ValueError."""
    if not training.streams:
        return
    stream = f"training.stream={training.stream}"
    if rollout.colocate:
        raise ValueError(
            f"{stream} trains while the engine samples, and with rollout.colocate=true they take turns; set one of them to its "
            "default"
        )
    if training.minibatch_prompts == rollout.prompts_per_step:
        raise ValueError(
            f"{stream} has no effect with training.minibatch_prompts={training.minibatch_prompts}, all of "
            "rollout.prompts_per_step: the only minibatch waits for all groups; lower minibatch_prompts, or set stream to off"
        )
    if training.stream == "prompt" and rollout.replay is None and rollout.function is not None:
        raise ValueError(
            f"{stream} needs groups of equal size, and rollout.function={rollout.function} may lose samples or make several "
            "sequences of one; set stream to arrival or off"
        )
    if training.stream == "prompt" and rollout.replay is None and (rollout.filter_uniform_groups or rollout.oversample > 1):
        raise ValueError(
            f"{stream} sets the prompts of each minibatch before they are sampled, and rollout.filter_uniform_groups="
            f"{str(rollout.filter_uniform_groups).lower()} with rollout.oversample={rollout.oversample:g} chooses them later; "
            "set these to false and 1, or stream to arrival"
        )
