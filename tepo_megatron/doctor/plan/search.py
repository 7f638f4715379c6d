"""Search all layouts of a number of GPUs: which ones fit, how fast they are predicted to be, and why the others are refused."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from tepo_megatron.actor.layout import check_layout, divisors
from tepo_megatron.base.errors import ConfigError
from tepo_megatron.config import AnyServer, Config, RolloutConfig, ShmTransportConfig, SyncConfig, UrlServerConfig
from tepo_megatron.doctor.plan.inputs import GIB, GPUS_PER_NODE, MemoryState, placement_of
from tepo_megatron.doctor.plan.memory import TrainerMemory, kv_bytes, states
from tepo_megatron.doctor.plan.parameters import sequence_state_bytes
from tepo_megatron.doctor.plan.roofline import Predictor, StepPrediction


@dataclass(frozen=True)
class LayoutCandidate:
    """The prediction for a config on one layout."""

    cfg: Config
    states: tuple[MemoryState, ...] = ()  # memory in each state; empty if the layout is invalid
    step: StepPrediction | None = None  # the predicted step, if requested and the layout fits
    why: str = ""  # reason why the layout is refused; empty if it fits

    @property
    def fullest(self) -> MemoryState:
        """Return the state with the most bytes."""
        return max(self.states, key=lambda state: state.total)

    @property
    def name(self) -> str:
        """Return the name of the layout in a table."""
        p, rollout, training = self.cfg.parallel, self.cfg.rollout, self.cfg.training
        mesh = [f"tp{p.tp}" + ("+sp" if p.sequence_parallel else ""), f"pp{p.pp}" + (f"x{p.vpp}" if p.vpp > 1 else "")]
        mesh += [f"cp{p.cp}", f"ep{p.ep}", f"dp{p.dp}"]
        shown = [word for word in mesh if not word.endswith("1") or word[:-1] in ("tp", "dp") or "+" in word]
        return f"{' '.join(shown)}, {training.max_tokens_per_microbatch} tokens, {rollout.servers} x tp{rollout.server.tp}"


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: list[LayoutCandidate]  # layouts that fit, fastest first
    refused: Mapping[str, list[str]]  # reason -> names of the layouts refused for it
    seen: int


def judge(predictor: Predictor) -> LayoutCandidate:
    """Return the prediction for one layout."""
    cfg, gpu, model = predictor.cfg, predictor.gpu, predictor.model
    try:
        check_layout(model.arch, cfg.parallel)
    except ConfigError as e:
        return LayoutCandidate(cfg, why=str(e).partition(";")[0])
    if fault := predictor.placement.fault:
        return LayoutCandidate(cfg, why=fault)
    memory = tuple(states(TrainerMemory.of(cfg, model), cfg.rollout, cfg.sync, gpu, predictor.assumed))
    layout = LayoutCandidate(cfg, memory)
    over = layout.fullest.total - gpu.memory
    if over > 0:
        return replace(layout, why=f"{over / GIB:.1f} GiB too much to {layout.fullest.name}")
    cache = next((s.parts["KV cache"] for s in memory if "KV cache" in s.parts), 0.0)
    server_tp = cfg.rollout.server.tp
    needed = cfg.served_tokens * kv_bytes(model.arch, server_tp) + sequence_state_bytes(model.arch, server_tp)
    if cache < needed:
        return replace(layout, why=f"the KV cache of {cache / GIB:.1f} GiB holds no sequence of {cfg.served_tokens} tokens")
    return replace(layout, step=predictor.step())


def search(predictor: Predictor, gpus: int) -> SearchResult:
    """Search every layout.

    A layout combines a mesh, the engine's tensor parallelism, the engine's number of GPUs (if it has its own), and the
    configured or twice the configured tokens per microbatch. Sequence parallelism is on wherever tp > 1.
    """
    best: list[LayoutCandidate] = []
    refused: dict[str, list[str]] = defaultdict(list)
    seen = 0
    for cfg in _candidates(predictor, gpus):
        seen += 1
        layout = judge(replace(predictor, cfg=cfg))
        if layout.why:
            refused[_reason(layout)].append(layout.name)
        else:
            best.append(layout)
    best.sort(key=lambda layout: (-layout.step.tokens_per_second if layout.step else 0.0, layout.fullest.total))
    return SearchResult(best, dict(sorted(refused.items(), key=lambda item: -len(item[1]))), seen)


def _candidates(predictor: Predictor, gpus: int) -> Iterator[Config]:
    cfg, experts = predictor.cfg, predictor.model.arch.experts is not None
    placement = placement_of(cfg.parallel.world_size, cfg.rollout)
    if placement.kind == "disaggregated":
        splits = [(n, gpus - n) for n in divisors(gpus) if n < gpus] + ([(3 * gpus // 4, gpus // 4)] if gpus % 4 == 0 else [])
    else:
        splits = [(gpus, gpus)]
    for trainer, engine in splits:
        for server_tp in (n for n in (1, 2, 4, 8) if n <= engine and engine % n == 0):
            rollout, sync = _served(cfg.rollout, cfg.sync, engine // server_tp, server_tp)
            for tp in (n for n in divisors(trainer) if n <= GPUS_PER_NODE):
                for pp in divisors(trainer // tp):
                    for cp in (n for n in divisors(trainer // tp // pp) if n <= GPUS_PER_NODE):
                        dp = trainer // tp // pp // cp
                        for ep in divisors(dp * cp) if experts else (1,):
                            mesh = replace(cfg.parallel, tp=tp, pp=pp, vpp=1, cp=cp, ep=ep, dp=dp, sequence_parallel=tp > 1)
                            for factor in (1, 2):
                                tokens = cfg.training.max_tokens_per_microbatch * factor
                                training = replace(cfg.training, max_tokens_per_microbatch=tokens)
                                yield replace(cfg, rollout=rollout, sync=sync, parallel=mesh, training=training)


def _served(cfg: RolloutConfig, sync: SyncConfig, servers: int, tp: int) -> tuple[RolloutConfig, SyncConfig]:
    """Return sections for this number of servers and GPUs per server. A folder replaces addresses, whose number is fixed."""
    server: AnyServer = replace(cfg.server, tp=tp)
    if isinstance(server, UrlServerConfig):
        server = server.at_rendezvous("servers")
        if isinstance(sync.transport, ShmTransportConfig):
            sync = replace(sync, transport=ShmTransportConfig(folder=sync.transport.folder or "weights"))
    return replace(cfg, servers=servers, min_servers=1, server=server), sync


def _reason(layout: LayoutCandidate) -> str:
    """Return why a layout is refused, without numbers that differ between layouts."""
    if not layout.states:
        return layout.why
    if "KV cache" in layout.why:
        return "the KV cache holds no sequence of the greatest length"
    state = layout.fullest
    return f"too much to {state.name}; most of it {state.largest}"
