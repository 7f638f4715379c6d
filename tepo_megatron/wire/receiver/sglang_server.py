"""Start the unmodified SGLang server with the key from the environment, also on CPU: `python -m ...sglang_server ARGUMENTS`.

Runs in SGLang's environment and imports nothing of the trainer. `/generate` can answer in binary. On CPU it fills five gaps
that every wheel of SGLang 0.5.23 has, in memory only:
  * the schemas of two image operators, because PyPI has only CUDA builds of torchvision;
  * the names of `sgl_kernel`, which are imported and never called;
  * its hash of (seed, position, column), from which seeded sampling draws;
  * the switch to Triton's batch-invariant kernels, which seeded sampling turns on. Here it does nothing: the other requests of
    a batch change a sample by rounding alone;
  * unpinned host memory for the chosen experts.
One function is replaced: `seeded_choice` samples if a request in the batch is greedy, or asks for top-k or top-p.
"""

import base64
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tepo_megatron.dist.own_peers import guard_process_groups
from tepo_megatron.wire.receiver import lifeline
from tepo_megatron.wire.receiver.binary_answer import BinaryAnswers, Sample, current, encode


def install(http_server: Any) -> None:
    """Add the middleware to SGLang's app, and answer its lists of samples in binary where the client takes that."""
    http_server.orjson_response = _in_binary(http_server.orjson_response)
    http_server.app.add_middleware(BinaryAnswers)


def _in_binary(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def response(content: Any, *args: Any, **kwargs: Any) -> Any:
        exchange = current.get()
        if exchange is not None and isinstance(content, list):
            samples = [to_sample(each, exchange.experts) for each in content]
            if None not in samples:
                exchange.body = encode([sample for sample in samples if sample is not None])
                content = []
        return upstream(content, *args, **kwargs)

    return response


def to_sample(answer: Any, experts: bool) -> Sample | None:
    """Return a sample of SGLang's own answer. None: it lacks log-probs, so that the JSON answer says what it has.

    A sample aborted before its first token may lack all fields but its finish reason.
    """
    meta, ids = answer["meta_info"], answer["output_ids"]
    entries = (meta.get("output_token_logprobs") or []) if ids else []  # (log-prob, token id, text) of each token
    if [entry[1] for entry in entries] != ids or not isinstance(meta["finish_reason"], dict):
        return None
    encoded, rows = meta.get("routed_experts") if experts else None, meta.get("output_token_sampling_mask")
    logprobs, masks = [entry[0] for entry in entries], None
    if rows is not None and ids:
        if [len(rows), len(meta["output_token_sampling_logprobs"])] != [len(ids)] * 2:
            return None
        logprobs = meta["output_token_sampling_logprobs"]
        masks = np.asarray([i for row in rows for i in row], np.int32), np.asarray([len(row) for row in rows], np.int32)
    return Sample(
        finish_reason=meta["finish_reason"]["type"],
        label=str(meta.get("weight_version", "")),
        prompt_tokens=meta.get("prompt_tokens", 0),
        prompt_crc=None,
        ids_T=np.asarray(ids, np.int32),
        logprobs_T=np.asarray(logprobs, np.float32),
        experts=None if encoded is None else np.frombuffer(base64.b64decode(encoded), np.int32),
        masks=masks,
    )


KEY_VARIABLE = "TEPO_SGLANG_KEY"
CPU_VARIABLE = "SGLANG_USE_CPU_ENGINE"

_LOW32 = 0xFFFFFFFF


class _Absent(types.ModuleType):
    """A module from which every name can be imported and none can be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} is not there on CPU")

        return absent


def fill_gaps() -> None:
    """Fill the gaps of SGLang on CPU. Call it once in each process of the server, before SGLang is imported."""
    import torch

    kernels = _Absent("sgl_kernel")
    kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None)
    kernels.__path__ = []
    sys.modules["sgl_kernel"] = kernels
    hashes = torch.library.Library("sgl_kernel", "FRAGMENT")
    hashes.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    hashes.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    _libraries.append(hashes)
    if not _torchvision_works():
        images = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            images.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(images)
    from sglang.srt import batch_invariant_ops

    batch_invariant_ops.enable_batch_invariant_mode = lambda: None
    from sglang.srt.mem_cache.pool_host import common

    common.ALLOC_MEMORY_FUNCS["cpu"] = _unpinned
    from sglang.srt.layers import sampler

    _upstream["choice"] = sampler.top_k_top_p_min_p_sampling_from_probs_torch
    sampler.top_k_top_p_min_p_sampling_from_probs_torch = seeded_choice


_upstream: dict[str, Any] = {}  # SGLang's functions that are replaced here, by name


def seeded_choice(
    probs_BV: Any, top_ks_B: Any, top_ps_B: Any, min_ps_B: Any, need_min_p: bool, seed_B: Any, positions_B: Any, **how: Any
) -> Any:
    """Sample under top-k and top-p such that a request's tokens depend on its own parameters alone.

    SGLang uses this function for a whole batch if one of its requests is filtered, and a greedy request counts as filtered:
    SGLang answers `/health` with a greedy token. SGLang's own function then gives the noise of column i to the token of rank i
    instead of token i, so that one health request changed every sample that ran at the same time. Here noise stays with its
    token, and rows without a filter draw from the same numbers as in a batch without filters.

    Args:
        probs_BV: fp32 probabilities, [batch, vocabulary].
        top_ks_B: int32; number of tokens to choose from, at least the vocabulary size for no filter.
        top_ps_B: fp32; 1.0 for no filter.
        min_ps_B: fp32; passed on to SGLang, which refuses it with seeds.
        seed_B: int64. None: no seeds, SGLang's own function samples.
        positions_B: Positions of the sampled tokens, from which the noise is hashed.
    Returns:
        int32 token ids, [batch]; as in SGLang's function, if filtered probabilities are asked for, also these in descending
        order, their ids, and the probabilities of the sampled tokens.
    """
    if seed_B is None or need_min_p:
        return _upstream["choice"](probs_BV, top_ks_B, top_ps_B, min_ps_B, need_min_p, seed_B, positions_B, **how)
    import torch
    from sglang.srt.layers import sampler

    sorted_BV, ids_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    beyond_k_BV = torch.arange(probs_BV.shape[-1]) >= top_ks_B[:, None]
    beyond_p_BV = (before_BV > top_ps_B[:, None]) & (top_ps_B[:, None] < 1)  # a sum of rounded numbers may exceed 1
    sorted_BV = sorted_BV.masked_fill(beyond_k_BV | beyond_p_BV, 0.0)
    kept_BV = torch.zeros_like(probs_BV).scatter_(1, ids_BV, sorted_BV)
    sampled_B = sampler.multinomial_with_seed(kept_BV.log(), seed_B, positions_B).view(-1)
    if not how.get("return_filtered_probs"):
        return sampled_B.to(torch.int32)
    return sampled_B.to(torch.int32), sorted_BV, ids_BV.to(torch.int32), kept_BV.gather(1, sampled_B[:, None].long()).view(-1)


def _unpinned(dims: tuple[int, ...], *, dtype: Any, device: str, allocator: Any, **pinning: Any) -> Any:
    """Allocate host memory without pinning. SGLang's own function asks CUDA to pin it."""
    return allocator.allocate(dims, dtype=dtype, device=device)


_libraries: list[Any] = []  # keeps the libraries alive, whose operators would go with them


def _torchvision_works() -> bool:
    import torch

    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.origin is not None, "SGLang needs torchvision"
    library = Path(spec.origin).with_name("_C.so")
    try:
        torch.ops.load_library(str(library))
    except OSError:
        return False
    return True


def murmur_hash32(seed_N: Any, positions_N: Any, columns_M: Any) -> Any:
    """Return MurmurHash3 of the 16 bytes (seed low, seed high, position, column), like SGLang's Triton kernel.

    Args:
        seed_N: 64-bit integer seeds, [N].
        positions_N: Integer positions, [N].
        columns_M: Integer columns of the vocabulary, [M].
    Returns:
        uint32 hashes, [N, M].
    """
    import torch

    seed_N = seed_N.view(torch.int64)
    hash_NM = torch.zeros(1, dtype=torch.int64)
    for block in (seed_N[:, None], (seed_N >> 32)[:, None], positions_N[:, None], columns_M[None, :]):
        mixed = (block.to(torch.int64) & _LOW32) * 0xCC9E2D51 & _LOW32
        mixed = _rotated(mixed, 15) * 0x1B873593 & _LOW32
        hash_NM = (_rotated(hash_NM ^ mixed, 13) * 5 + 0xE6546B64) & _LOW32
    hash_NM = hash_NM ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hash_NM = (hash_NM ^ hash_NM >> shift) * factor & _LOW32
    return (hash_NM ^ hash_NM >> 16).to(torch.uint32)


def _rotated(x: Any, bits: int) -> Any:
    return (x << bits | x >> (32 - bits)) & _LOW32


def hide(key: str) -> None:
    """Replace the key in log records: SGLang logs all of its arguments."""
    make = logging.getLogRecordFactory()

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        entry = make(*args, **kwargs)
        if key in (text := entry.getMessage()):
            entry.msg, entry.args = text.replace(key, "***"), ()
        return entry

    logging.setLogRecordFactory(record)


def main(argv: list[str]) -> None:
    """Run the server until a signal ends it. `argv` holds SGLang's arguments without the key."""
    if os.environ.get(CPU_VARIABLE):
        from sglang.srt.arg_groups import choices

        # It computes attention for each sequence separately, which is all that seeded sampling needs of a backend.
        choices.add_deterministic_attention_backend_choices(["torch_native"])
        choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    args = prepare_server_args([*argv, f"--api-key={os.environ[KEY_VARIABLE]}"])
    from sglang.srt.entrypoints import http_server

    install(http_server)
    try:
        run_server(args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


# SGLang's processes are spawned: each imports this file again, under the second name.
if __name__ in ("__main__", "__mp_main__"):
    if not os.environ.get(KEY_VARIABLE):
        raise SystemExit(f"{KEY_VARIABLE} is not set: without a key anyone could replace the weights")
    lifeline.hold()
    hide(os.environ[KEY_VARIABLE])
    guard_process_groups()
    if os.environ.get(CPU_VARIABLE):
        fill_gaps()
if __name__ == "__main__":
    main(sys.argv[1:])
