"""The actor: log-probs and entropies of the policy, its updates, and the export of its weights."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from tepo_megatron.actor import build
from tepo_megatron.actor.accumulator import MinibatchTokenStats, UpdateAccumulator, UpdateResult, mismatch
from tepo_megatron.actor.kernels import check_transformer_engine, hardware, installed
from tepo_megatron.actor.minibatch import MinibatchInputs, Packer
from tepo_megatron.actor.offload import PARTS, HostActivations, Offloader, Part
from tepo_megatron.actor.output_stats import MaskSource, OutputRows, OutputStats, Visit, device_mask, truncation_of
from tepo_megatron.actor.pipeline import ExpertReplay, PipelineSchedule
from tepo_megatron.actor.precision import alignment, check_hardware
from tepo_megatron.actor.recorder import TokenRecorder
from tepo_megatron.actor.reference import HostWeights, Teacher
from tepo_megatron.base.errors import NumericalError
from tepo_megatron.base.seeding import derive_seed, hash_rows
from tepo_megatron.base.types import PackedMicrobatch, TokenStats, TrainBatch
from tepo_megatron.config import Config
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.losses.objective import Objective
from tepo_megatron.losses.weighting import BatchStatistics
from tepo_megatron.models.families import Family, find_family, read_config
from tepo_megatron.models.gather import Binding, bind, export_hf, load_hf
from tepo_megatron.models.hf_io import HfReader
from tepo_megatron.models.ops import Architecture
from tepo_megatron.ops.context_parallel import Segments
from tepo_megatron.ops.planning import Plan, another_plan

UPDATE = "an update"


@dataclass(eq=False)
class Actor:
    """This rank's part of the policy: model, optimizer and pipeline schedule. All ranks call every public method.

    Token statistics are valid on the last pipeline stage. A pass without gradient takes the collectives of
    `MinibatchTokenStats`.
    """

    cfg: Config
    groups: ParallelDims
    family: Family
    arch: Architecture
    config: TransformerConfig
    chunks: list[DistributedDataParallel]  # this rank's model chunks in DDP
    bindings: list[Binding]  # this rank's parameters with their Hugging Face names
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    packer: Packer
    schedule: PipelineSchedule
    offloader: Offloader
    activations: HostActivations | None  # context of `training.offload_activations`; None without it
    rows: OutputRows | None  # selects the response rows before the output layer; None except on the last pipeline stage
    reference: HostWeights | None = None  # the reference policy's weights; None before `keep_reference`
    noise_floor: float | None = None  # noise floor of dH in nats; None before `measure_noise` has found one
    masks: MaskSource = field(init=False)  # attaches sampling masks to batches that lack them
    _step: int = 0
    _gathered: bool = True

    def __post_init__(self) -> None:
        self.masks = MaskSource(truncation_of(self.cfg.rollout), self._stats, self._forward, self.groups)

    @classmethod
    def open(cls, cfg: Config, groups: ParallelDims) -> "Actor":
        """Build this rank's part of the model with the weights of `model.path`, and its optimizer."""
        hf_config = read_config(cfg.model.path)
        family = find_family(hf_config)
        arch = family.architecture(hf_config)
        replays, device = cfg.rollout.replay_experts, groups.device
        shares = build.shares_prompts(cfg.training, cfg.model, device, groups.cp.size, arch)
        check_hardware(cfg.model, hardware(device))
        check_transformer_engine(cfg.megatron, installed())
        fixed_length = cfg.training.max_tokens_per_microbatch if cfg.megatron.fixed_length else 0
        padding = alignment(cfg.model, cfg.parallel, fixed_length)
        packer = Packer(cfg.training, groups, padding, shares_prompts=shares, replays_experts=replays)
        if cfg.megatron.tp_comm_overlap:
            some_bf16, tokens = any(cfg.megatron.bf16_layers), padding.padded([1])[0] // groups.cp.size
            build.open_user_buffers(cfg.model.fp8, some_bf16, cfg.parallel.tp, tokens, arch.hidden_size)
        config = build.transformer_config(
            arch, cfg.model, cfg.parallel, device, cfg.training, replays, shares, megatron=cfg.megatron
        )
        bare = build.build_chunks(config, arch, cfg.model, groups)
        bindings = bind(bare, family, arch)
        # the weights must be loaded before the optimizer copies its fp32 masters from them
        load_hf(bindings, HfReader(cfg.model.path), family, arch, groups.tp)
        fused = cfg.training.logits_budget_mib is not None
        rows = OutputRows.install(bare[-1].output_layer, keep_hidden=fused) if groups.is_last_stage else None
        chunks = build.wrap_ddp(config, bare, cfg.megatron, cfg.platform)
        optimizer, scheduler = build.build_optimizer(cfg.optimizer, cfg.model, cfg.megatron, chunks, cfg.platform)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        experts = ExpertReplay(chunks, arch.sparse_layers, groups, cfg.parallel.sequence_parallel) if replays else None
        schedule = PipelineSchedule(chunks, rows, groups, experts)
        offloader = Offloader(chunks, optimizer, device)
        activations = HostActivations(chunks, device) if cfg.training.offload_activations else None
        return cls(
            cfg,
            groups,
            family,
            arch,
            config,
            chunks,
            bindings,
            optimizer,
            scheduler,
            packer,
            schedule,
            offloader,
            activations,
            rows,
        )

    def offload(self, *parts: Part) -> None:
        """Offload these parts, or all (see `Offloader`). Until `load`, methods that need them raise RuntimeError."""
        self.finish_step()
        self.offloader.release(parts or PARTS)

    def load(self, *parts: Part) -> None:
        """Restore these parts, or all, bit for bit. Gradients are 0."""
        self.offloader.restore(parts or PARTS)

    def require_loaded(self, what: str, *parts: Part) -> None:
        """Raise RuntimeError if a part is offloaded. Gather parameters that an update left sharded, but for UPDATE."""
        self.offloader.require(what, parts or PARTS)
        if what != UPDATE:
            self.finish_step()

    def attach_old_stats(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with the log-probs and entropies of the current weights as its old statistics.

        Several updates on a rollout batch need it before the first; a single one takes them from its own forward pass.
        """
        return batch.with_old_stats(self._whole_stats(batch))

    def keep_reference(self) -> None:
        """Read the reference policy, `objective.ref_kl.path` or else `model.path`, into host memory."""
        self.require_loaded("the reference policy", "parameters")
        kept = HostWeights.copied([b.parameter for b in self.bindings])
        path = self.cfg.objective.reference_path or self.cfg.model.path
        load_hf(self.bindings, HfReader(path), self.family, self.arch, self.groups.tp)
        kept.exchange()  # restores the policy and keeps the reference
        self.reference = kept

    def attach_ref_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with the reference policy's log-probs; its own routers choose experts. Needs `keep_reference`."""
        assert self.reference is not None, "keep_reference comes first"
        self.finish_step()
        with self.reference.in_place():
            return replace(batch, ref_logprobs_N=self.logprobs(batch, replays=False))

    def measure_noise(self, batch: TrainBatch) -> float | None:
        """Return the noise floor of dH in nats: repeat the old pass under another packing and take the 99 % quantile of |dH|.

        It is the same on every rank, and later updates use it. None if no other packing exists; the last value then stays.
        """
        assert batch.old_entropies_N is not None, "attach_old_stats comes first"
        tokens = self.cfg.training.tokens_without_grad(self.cfg.megatron.fixed_length)
        plan = another_plan(partial(self.packer.plan, batch), batch.lengths, self.groups.dp.size, tokens)
        if plan is None:
            return None
        again_N = self._whole_stats(batch, plan).entropy_R
        difference_N = (again_N - batch.old_entropies_N).abs()
        floor = difference_N.kthvalue(math.ceil(0.99 * difference_N.numel())).values
        self.noise_floor = float(self.groups.broadcast_from_last_stage(floor.double().reshape(1)))
        return self.noise_floor

    def host_copy(self) -> HostWeights:
        """Return a copy of this rank's current parameters in host memory."""
        self.require_loaded("a copy of the weights", "parameters")
        return HostWeights.copied([b.parameter for b in self.bindings])

    def logprobs(self, batch: TrainBatch, replays: bool = True) -> Tensor:
        """Return the log-probs of the response tokens under the current weights: fp32 [N] nats, valid on the last stage.

        `replays`: False: the routers choose their experts, even under rollout.replay_experts.
        """
        return self._whole_stats(batch, replays=replays).logprob_R

    def start_step(self, step: int) -> None:
        """Advance the learning-rate schedule by one step (a rollout batch). Call it before the step's first update."""
        self._step = step
        self.scheduler.step(increment=1)

    def finish_step(self) -> None:
        """Gather every parameter on every rank, for code that reads parameters.

        Under `megatron.ddp.overlap_param_gather` an update leaves that to the next update's forward pass. Collectives: then one
        all-gather over dp x cp per bucket, else none.
        """
        if not self._gathered:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
            self._gathered = True

    def update(self, batch: TrainBatch, objective: Objective, recorder: TokenRecorder | None = None) -> UpdateResult:
        """Take one optimizer step on a minibatch and return its metrics. Args: as for `backward`.

        Old statistics that the batch lacks are those of this forward pass: ratio 1 and dH 0, exactly. In the first update of a
        rollout batch, the result then also has the engine's mismatch. Raises NumericalError on every rank for a loss
        (before the step) or a gradient norm that is not finite.
        """
        plan = self.packer.plan(batch)
        accumulator = self.backward(batch, objective, plan, recorder)
        result = accumulator.reduce(self.groups)
        loss, _ = result.metrics["loss/total"]
        if recorder is not None:
            recorder.write(batch, loss)
        if not math.isfinite(loss):
            raise NumericalError(
                f"loss is {loss} in step {self._step}, update {batch.update}; no weight was changed by it. Lower optimizer.lr, "
                f"or look for infinite rewards"
            )
        _, grad_norm, _ = self.optimizer.step()
        self._gathered = not self.cfg.megatron.gathers_late(self.cfg.platform)
        if not math.isfinite(grad_norm):
            raise NumericalError(
                f"gradient norm is {grad_norm} in step {self._step}, update {batch.update}; lower optimizer.lr"
            )
        result.metrics["actor/grad_norm"] = (float(grad_norm), 1.0)
        result.metrics.update((name, (value, 1.0)) for name, value in self.packer.metrics(batch, plan).items())
        if accumulator.whole is None:
            return result
        batch = batch.with_old_stats(accumulator.whole.gather())
        return replace(result, mismatch=mismatch(batch, self.groups), measured=batch)

    def backward(
        self, batch: TrainBatch, objective: Objective, plan: Plan | None = None, recorder: TokenRecorder | None = None
    ) -> UpdateAccumulator:
        """Compute the gradients of the objective on a minibatch, reduced over all ranks, in `main_grad`.

        Args:
            plan: Plan of its microbatches. None: the usual one.
            recorder: Receives every number that the loss of each token is made of. None: nothing is recorded.
        """
        self.require_loaded(UPDATE)
        plan = plan or self.packer.plan(batch)
        inputs = MinibatchInputs(batch, self.groups.device, self.noise_floor, self.cfg.rollout.max_response_tokens)
        weights = self._batch_statistics(batch, inputs, objective) if objective.needs_batch_statistics else None
        teacher = Teacher.visit(self, batch, plan) if objective.needs_teacher else None
        compared = truncation_of(self.cfg.rollout) if batch.update == 0 and batch.recomputed_mask is None else None
        unmeasured = batch.update == 0 and batch.old_entropies_N is None
        whole = MinibatchTokenStats(batch.num_tokens, self.groups) if unmeasured else None
        mask = device_mask(batch, self.groups.device)
        accumulator = UpdateAccumulator(batch, self.groups.device, whole, mask)

        def loss(microbatch: PackedMicrobatch, output: Tensor) -> Tensor:
            segments = Segments.of(microbatch, self.groups.cp.group)
            stats = self._stats(microbatch, output, mask, compared, teacher=teacher and teacher.take(microbatch))
            rows = inputs.rows(microbatch, segments, stats, weights)
            out = objective(stats, rows)
            accumulator.add(out, microbatch, segments, stats)
            if recorder is not None:
                recorder.add(microbatch, stats, rows, weights, out)
            return out.loss

        for chunk in self.chunks:
            chunk.zero_grad_buffer()  # also makes the next forward pass gather the parameters
        self.optimizer.zero_grad()
        with self.activations or contextlib.nullcontext():
            self.schedule.forward_backward(self.packer.pack(batch, plan), loss, batch.num_tokens)
        self._gathered = True
        return accumulator

    def _batch_statistics(self, batch: TrainBatch, inputs: MinibatchInputs, objective: Objective) -> BatchStatistics | None:
        """Return the token weights that an objective takes from the whole minibatch; None except on the last pipeline stage.

        This takes a pass without gradient, unless it is the first update of a rollout batch with known old statistics.
        """
        stats_N = inputs.old_stats if batch.update == 0 else None
        stats_N = self._whole_stats(batch) if stats_N is None else stats_N
        if not self.groups.is_last_stage:
            return None
        seed = derive_seed(self.cfg.seed, "weighting", self._step, batch.update)
        keys_N = hash_rows(seed, batch.token_keys_N(self.groups.device))
        return objective.batch_statistics(stats_N, inputs.whole(stats_N), keys_N)

    def _whole_stats(self, batch: TrainBatch, plan: Plan | None = None, replays: bool = True) -> TokenStats:
        """Return fp32 _N log-probs and entropies, without gradient, valid on the last stage. `plan` replaces the usual plan."""
        whole, mask = MinibatchTokenStats(batch.num_tokens, self.groups), device_mask(batch, self.groups.device)

        def visit(microbatch: PackedMicrobatch, output: Tensor) -> None:
            whole.add(microbatch, self._stats(microbatch, output, mask))

        self._forward(batch, visit, plan, replays)
        return whole.gather()

    def _forward(self, batch: TrainBatch, visit: Visit, plan: Plan | None = None, replays: bool = True) -> None:
        self.require_loaded("a forward pass", "parameters")
        plan = plan or self.packer.plan(batch, self.cfg.training.tokens_without_grad(self.cfg.megatron.fixed_length))
        self.schedule.forward(self.packer.pack(batch, plan, replays), visit)

    def export_hf(self, out: Path, check_in_place: Callable[[], object] = lambda: None) -> None:
        """Write the current weights as a Hugging Face directory. Args: see `gather.export_hf`."""
        self.require_loaded("an export", "parameters")
        base, stops = Path(self.cfg.model.path), self.cfg.rollout.stop_token_ids
        export_hf(self.bindings, self.family, self.arch, self.groups, base, out, check_in_place, stops)

    @property
    def _stats(self) -> OutputStats:
        return OutputStats(
            self.cfg.rollout.temperature,
            self.arch.vocab_size,
            self.groups,
            self.rows,
            budget_mib=self.cfg.training.logits_budget_mib,
            sums_hidden_gradient=not self.cfg.parallel.sequence_parallel,
        )
