"""Run packed microbatches through Megatron's own pipeline schedules, with spans of the passes while a step is traced.

The forward passes and the loss are called by our code. The backward passes are called by Megatron's schedules, whose function
for one of them is replaced for the step. On a GPU these spans are the time in which the host launches kernels. Pairs of CUDA
events then show in a row of their own when the kernels ran.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor, nn

from tepo_megatron.actor.output_stats import OutputRows
from tepo_megatron.actor.rotary import PACKED
from tepo_megatron.base.types import PackedMicrobatch
from tepo_megatron.dist.parallel import ParallelDims
from tepo_megatron.monitor.hang_watchdog import progress
from tepo_megatron.monitor.tracer import tracer

DEVICE_ROW = "GPU"


class DeviceSpans:
    """Pairs of CUDA events around passes. On a CPU it records nothing."""

    def __init__(self, device: torch.device) -> None:
        self._pairs: list[tuple[str, dict[str, Any], torch.cuda.Event, torch.cuda.Event]] = []
        self._zero, self._start = self._now() if device.type == "cuda" else None, tracer.clock()

    def _now(self) -> torch.cuda.Event:
        torch.cuda.synchronize()
        return self._record()

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def around(self, name: str, **args: Any) -> Iterator[None]:
        """Record the kernels that the block launches as one span."""
        if self._zero is None:
            yield
            return
        begun = self._record()
        yield
        self._pairs.append((name, args, begun, self._record()))

    def finish(self) -> None:
        """Wait for the kernels, and add the spans to the trace."""
        if self._zero is None:
            return
        torch.cuda.synchronize()
        for name, args, begun, ended in self._pairs:
            start, end = (self._start + int(1e6 * self._zero.elapsed_time(event)) for event in (begun, ended))
            tracer.add(name, DEVICE_ROW, start, max(start, end), **args)


_device: list[DeviceSpans] = []  # of the traced step; empty without one


@contextlib.contextmanager
def pass_span(name: str, **args: Any) -> Iterator[None]:
    """Record the block as a pass of the traced step."""
    with tracer.span(name, **args), _device[0].around(name, **args) if _device else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def traced_passes(device: torch.device) -> Iterator[None]:
    """Record the backward passes inside the block, and the kernels of all passes.

    Backward passes are numbered in their order. Without virtual pipeline stages that is the order of the forward passes.
    """
    original = schedules.backward_step

    @functools.wraps(original)
    def backward_step(*args: Any, **kwargs: Any) -> Any:
        progress.backward += 1
        with pass_span("backward", microbatch=progress.backward):
            return original(*args, **kwargs)

    schedules.backward_step = backward_step
    _device.append(DeviceSpans(device))
    try:
        yield
        _device[0].finish()
    finally:
        _device.clear()
        schedules.backward_step = original


class ExpertReplay:
    """Routes tokens to the experts that the inference engine's routers chose (arXiv 2510.11370).

    Engine and actor round differently, so for a few tokens their routers choose different experts, and the actor's log-probs
    would be those of another network than the one that sampled. Only the choice is taken from the engine: the weights of the
    chosen experts are still the softmax of the actor's own router logits, and gradients reach the router. The choices are set
    before the forward pass of each microbatch. Megatron's separate replay action for recomputed activations is not needed,
    because no module with a router is recomputed (config/run.py refuses it).
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], sparse_layers: Sequence[int], groups: ParallelDims, sequence_parallel: bool
    ) -> None:
        self._parts, self._part = (groups.tp.size, groups.tp.rank) if sequence_parallel else (1, 0)
        places = {layer: k for k, layer in enumerate(sparse_layers)}
        self._routers = [
            [(_replay_of(m), places[m.layer_number - 1]) for m in chunk.modules() if isinstance(m, TopKRouter)]
            for chunk in chunks
        ]

    def set(self, chunk: int, experts_SKT: Tensor) -> None:
        """Make the routers of a chunk route the tokens of its next forward pass to these experts.

        `experts_SKT`: uint8 or int16 on the device, the experts of the S tokens of this context-parallel rank.
        """
        experts_SKT = experts_SKT.chunk(self._parts)[self._part]
        for router, k in self._routers[chunk]:
            router.clear_indices()  # also clears the list for recomputed activations, which would grow forever
            router.set_target_indices(experts_SKT[:, k].long())
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def clear(self) -> None:
        """Make all routers choose their experts again."""
        for router, _ in (pair for routers in self._routers for pair in routers):
            router.clear_indices()
            router.clear_router_replay_action()


def _replay_of(router: TopKRouter) -> RouterReplay:
    assert router.router_replay is not None, "the model was built for it (build.transformer_config)"
    return router.router_replay


# (microbatch, logits [R, V / tp] in the model's dtype, or hidden states [R, H]) -> its part of the loss; the parts are summed
LossFunction = Callable[[PackedMicrobatch, Tensor], Tensor]
Visitor = Callable[[PackedMicrobatch, Tensor], None]


class PipelineSchedule:
    """Runs microbatches over the pipeline. Only the last stage calls the given function, with its response rows."""

    def __init__(
        self, chunks: Sequence[nn.Module], rows: OutputRows | None, groups: ParallelDims, experts: ExpertReplay | None = None
    ) -> None:
        self._chunks, self._rows, self._groups, self._experts = list(chunks), rows, groups, experts

    def forward(self, microbatches: Sequence[PackedMicrobatch], visit: Visitor) -> None:
        """Run a forward pass without gradients."""

        def on_output(microbatch: PackedMicrobatch, output: Tensor, non_loss_data: bool) -> None:
            visit(microbatch, output.squeeze(0))

        with torch.no_grad():
            self._run(microbatches, on_output, forward_only=True, collect_non_loss_data=True)

    def forward_backward(self, microbatches: Sequence[PackedMicrobatch], loss: LossFunction, tokens: int) -> None:
        """Run forward and backward, and reduce gradients over dp and cp.

        Afterwards `main_grad` holds the gradient of the summed losses of all ranks. Megatron divides all gradients by the
        number of tokens that the ranks report, which adds up to N. Multiplying the loss by N here cancels that division,
        whatever the objective's own denominators are.
        """

        def on_output(microbatch: PackedMicrobatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            local = torch.tensor(microbatch.rows_R.numel(), dtype=torch.int, device=output.device)
            return loss(microbatch, output.squeeze(0)) * tokens, local, {}

        self._run(microbatches, on_output, forward_only=False)

    def _run(self, microbatches: Sequence[PackedMicrobatch], on_output: Callable[..., Any], **how: bool) -> None:
        """Run Megatron's schedule. `on_output` gets each microbatch and its output on the last stage."""

        def forward_step(data: Iterator[PackedMicrobatch], chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            progress.microbatch += 1
            microbatch = on_device(next(data), self._groups.device)
            if self._rows is not None:
                self._rows.current = microbatch.rows_R
            if self._experts is not None and microbatch.experts_SKT is not None:
                self._experts.set(self._chunks.index(chunk), microbatch.experts_SKT)
            # positions come from cu_seqlens
            forward = partial(chunk, microbatch.tokens_S, None, None, packed_seq_params=packed_seq_params(microbatch))
            if not tracer.active:
                return forward(), partial(on_output, microbatch)
            number = progress.microbatch
            with pass_span("forward", microbatch=number, tokens=microbatch.tokens_S.numel()):
                output = forward()
            return output, partial(traced_output, number, microbatch)

        def traced_output(number: int, microbatch: PackedMicrobatch, *arguments: Any, **how: Any) -> Any:
            with pass_span("loss", microbatch=number):
                return on_output(microbatch, *arguments, **how)

        progress.microbatch = progress.backward = 0
        several = len(self._chunks) > 1
        length = microbatches[0].tokens_S.numel()  # nominal: in a pipeline each length is sent with its activations
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in self._chunks] if several else iter(microbatches),
            model=self._chunks if several else self._chunks[0],
            num_microbatches=len(microbatches),
            seq_length=length,
            decoder_seq_length=length,
            micro_batch_size=1,
            **how,
        )
        if self._experts is not None:
            self._experts.clear()


def on_device(microbatch: PackedMicrobatch, device: torch.device) -> PackedMicrobatch:
    """Return the same microbatch with its tensors on another device."""
    moved = {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in vars(microbatch).items()}
    return PackedMicrobatch(**moved)


def packed_seq_params(microbatch: PackedMicrobatch) -> PackedSeqParams:
    """Return Megatron's description of a packed (THD) microbatch. Padding belongs to the piece before it.

    If prompts are shared, the result carries the `starts` of the pieces for attention, and they are registered with the rotary
    embedding.
    """
    cu = microbatch.cu_seqlens
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu,
        cu_seqlens_kv_padded=cu,
        max_seqlen_q=microbatch.max_seqlen,
        max_seqlen_kv=microbatch.max_seqlen,
    )
    if microbatch.starts is not None:
        params.starts = microbatch.starts
        PACKED.start(cu, microbatch.starts)
    return params
