"""The CPU platform: unmodified Megatron-Core without a GPU, its collectives over gloo.

Megatron-Core (0.16.1, and 0.19.2 by `make test-pins`) names `torch.cuda` throughout, although little of it needs a
GPU. Each redirection is one function with its reason, in the file of what it redirects:

    tensors.py    factories and tensor methods that ask for a CUDA device
    cuda_api.py   torch.cuda: current device, streams, events, memory, random state
    gloo.py       the two collectives that gloo lacks, and those of a rank alone
    adam.py       Adam in the form that the distributed optimizer expects of a fused one
    memory.py     freed memory, which glibc would give back at once
    mcore.py      importing Megatron-Core, and its own slips where there is neither GPU nor Transformer Engine

They last as long as the process and cover all of it: a process is a CPU process or a CUDA process.
"""

from __future__ import annotations

import os

from tepo_megatron.platform import cuda_api, gloo, mcore, memory, tensors


def install(transformer_engine: bool = False) -> None:
    """Redirect, then import Megatron-Core. Once per process, before anything of `megatron.core` is imported.

    Args:
        transformer_engine: leave Transformer Engine and Apex visible, and Megatron-Core's choice of Adam as it is.
    """
    hide_gpus()
    tensors.redirect_factories()
    tensors.redirect_tensor_methods()
    cuda_api.redirect_device_queries()
    cuda_api.redirect_streams_and_events()
    cuda_api.redirect_memory_statistics()
    cuda_api.redirect_random_state()
    cuda_api.silence_nvtx()
    gloo.add_uneven_collectives()
    gloo.shorten_groups_of_one()
    if not transformer_engine:
        mcore.hide_gpu_packages()
    mcore.lend_triton_to_paged_stash()
    with mcore.without_compilation(), mcore.without_import_warnings():
        mcore.load()
    mcore.mend_missing_transformer_engine_names()
    mcore.mend_host_copy_of_splits()
    if not transformer_engine:
        mcore.use_host_adam()
    mcore.silence_generator_warning()
    memory.keep_freed_memory()


def hide_gpus() -> None:
    """Hide GPUs from CUDA itself too: autograd, in C++, starts a thread for each that it finds, and no fork survives that."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
