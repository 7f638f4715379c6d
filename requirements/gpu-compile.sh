#!/usr/bin/env bash
# Compile the packages without wheels (Transformer Engine's part for PyTorch, and Apex) against the active environment's torch.
# Takes the arguments of `uv pip install`. MAX_JOBS, TORCH_CUDA_ARCH_LIST (Apex), CUDA_HOME: as PyTorch reads them.
set -euo pipefail
if [ "${COMPILE:-1}" = 0 ]; then
    echo "COMPILE=0: left out: $*"
    exit
fi
# Without this, Transformer Engine would use the headers of the environment's wheels, which are of several releases of CUDA.
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
nvidia=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/nvidia
# Use the headers of the libraries that are loaded at run time.
export CPATH=$nvidia/cudnn/include:$nvidia/nccl/include
export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE
export APEX_CPP_EXT=1 APEX_CUDA_EXT=1 # its --cpp_ext and --cuda_ext
exec uv pip install --no-deps --no-build-isolation "$@"
