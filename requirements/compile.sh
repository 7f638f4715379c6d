#!/usr/bin/env bash
# Resolve the pins again: requirements/compile.sh UV
set -e
compile() { "$uv" pip compile --quiet --upgrade --no-config --no-header --no-annotate "$@"; }
uv=$1
compile --python-version 3.11 --no-emit-package tepo-megatron --override requirements/overrides.txt --extra cpu --group dev \
  pyproject.toml -o requirements/cpu.txt
compile --python-version 3.11 requirements/sglang-cpu.in -o requirements/sglang-cpu.txt
compile --python-version 3.11 requirements/docs.in -o requirements/docs.txt
compile --universal --python-version 3.11 --override requirements/overrides.txt requirements/launch.in -o requirements/launch.txt
for name in openenv verifiers; do
  compile --universal --python-version 3.11 requirements/$name.in -o requirements/$name.txt
done
for engine in vllm sglang; do
  compile --python-version 3.12 --python-platform x86_64-manylinux_2_34 --no-emit-package tepo-megatron \
    --constraint requirements/gpu-constraints.txt --extra $engine --extra te --extra datasets --extra tensorboard --extra wandb \
    --extra test pyproject.toml -o requirements/gpu-$engine.txt
done
sed -n 's/^# *\(sglang==.*\)/\1/p' requirements/sglang-cpu.in >> requirements/sglang-cpu.txt  # without its dependencies
sed -i 's/+cpu$//' requirements/cpu.txt requirements/sglang-cpu.txt  # a local version would bind the pin to one source of wheels
