"""Run unmodified Megatron-Core on a CPU, with its collectives over gloo.

Megatron-Core (0.16.1, and 0.19.2 by `make test-pins`) calls `torch.cuda` throughout, although little of it needs a GPU. Each
redirection is one function that states its reason, in a file for each kind:

    tensors.py    factories and tensor methods that request a CUDA device
    cuda_api.py   torch.cuda: current device, streams, events, memory, random state
    gloo.py       two collectives that gloo lacks, and shortcuts for groups of one rank
    adam.py       Adam with the interface of a fused one, which the distributed optimizer expects
    memory.py     keep freed memory, which glibc would return to the system at once
    mcore.py      import Megatron-Core, and fix its bugs on machines without GPU and Transformer Engine

Redirections last as long as the process and affect all of it: a process is either a CPU process or a CUDA process.
"""

import os

from tepo_megatron.dist.platform import cuda_api, gloo, mcore, memory, tensors


def install(transformer_engine: bool = False) -> None:
    """Redirect `torch.cuda` to the CPU, then import Megatron-Core."""
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
    mcore.provide_triton_to_paged_stash()
    with mcore.without_compilation(), mcore.without_import_warnings():
        mcore.load()
    mcore.fix_missing_transformer_engine_names()
    mcore.fix_host_copy_of_splits()
    if not transformer_engine:
        mcore.use_host_adam()
    mcore.silence_generator_warning()
    memory.keep_freed_memory()


def hide_gpus() -> None:
    """Hide GPUs from CUDA itself too.

    Otherwise autograd, in C++, starts a thread for each GPU that it finds, and a forked child cannot use autograd then.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
