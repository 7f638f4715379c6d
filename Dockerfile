# syntax=docker/dockerfile:1
# Two images, since the pins of vLLM and SGLang contradict each other:
#   docker build --target train-vllm   -t tepo:vllm .
#   docker build --target train-sglang -t tepo:sglang .
# Layers that change rarely come first: system, pinned packages, compiled extensions, this project.

# The base must have the CUDA of the pinned torch, 13.0: Apex refuses to be built with another one. It must have no cuDNN:
# Transformer Engine would load it, PyTorch loads that of its wheel, and one process would have both.
ARG BASE_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04
# Apex is in no registry. Without access to GitHub, use "apex @ file:///..." with this commit in a folder of the base.
ARG APEX="apex @ git+https://github.com/NVIDIA/apex.git@6424da3b4faa6c8f062da4a48c424fff3f02d42d"
# Apex is compiled for 9.0 (H100, H200) and 10.0 (B200).
ARG TORCH_CUDA_ARCH_LIST="9.0;10.0"
ARG MAX_JOBS=8
# 0 omits Apex and Transformer Engine's part for PyTorch: the image can be inspected, but not used for training.
ARG COMPILE=1

FROM ${BASE_IMAGE} AS system
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Ubuntu keeps no old versions of packages: the base image pins the release
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap ca-certificates git ibverbs-providers libibverbs1 libnuma1 procps \
       python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 tepo && mkdir /workspace && chown tepo /workspace
ARG UV_VERSION=0.13.9
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH UV_NO_CACHE=1 PYTHONUNBUFFERED=1
RUN python3.12 -m venv "$VIRTUAL_ENV" && pip install --no-cache-dir "uv==$UV_VERSION"
COPY requirements/gpu-build.txt /opt/requirements/
RUN uv pip install --no-deps -r /opt/requirements/gpu-build.txt
# Both targets inherit the following settings. A container is healthy if it can list the GPUs and import the project.
WORKDIR /workspace
HEALTHCHECK --interval=60s --timeout=30s --start-period=30s \
    CMD ["/bin/bash", "-c", "nvidia-smi --list-gpus && tepo --version"]
CMD ["tepo", "--help"]

# Both targets have the same steps on different pins. They are written twice, because a stage takes no parameters.
FROM system AS train-vllm
COPY requirements/gpu-vllm.txt /opt/requirements/gpu.txt
RUN grep -v '^transformer-engine-torch==' /opt/requirements/gpu.txt > /opt/requirements/wheels.txt \
    && uv pip install --no-deps -r /opt/requirements/wheels.txt
ARG TORCH_CUDA_ARCH_LIST
ARG MAX_JOBS
ARG COMPILE
COPY requirements/gpu-compile.sh /opt/requirements/
RUN /opt/requirements/gpu-compile.sh "$(grep '^transformer-engine-torch==' /opt/requirements/gpu.txt)"
ARG APEX
RUN /opt/requirements/gpu-compile.sh "$APEX"
COPY . /opt/tepo_megatron
RUN uv pip install --no-deps --no-build-isolation /opt/tepo_megatron \
    && rm -r /opt/tepo_megatron/build /opt/tepo_megatron/tepo_megatron.egg-info
USER 10001

FROM system AS train-sglang
COPY requirements/gpu-sglang.txt /opt/requirements/gpu.txt
RUN grep -v '^transformer-engine-torch==' /opt/requirements/gpu.txt > /opt/requirements/wheels.txt \
    && uv pip install --no-deps -r /opt/requirements/wheels.txt
ARG TORCH_CUDA_ARCH_LIST
ARG MAX_JOBS
ARG COMPILE
COPY requirements/gpu-compile.sh /opt/requirements/
RUN /opt/requirements/gpu-compile.sh "$(grep '^transformer-engine-torch==' /opt/requirements/gpu.txt)"
ARG APEX
RUN /opt/requirements/gpu-compile.sh "$APEX"
COPY . /opt/tepo_megatron
RUN uv pip install --no-deps --no-build-isolation /opt/tepo_megatron \
    && rm -r /opt/tepo_megatron/build /opt/tepo_megatron/tepo_megatron.egg-info
USER 10001
