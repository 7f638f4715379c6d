# Every target sets itself up: a virtual environment with pinned packages, re-used while nothing changed.
SHELL := bash
# The first of these that is there, with venv and a wheel of every pin.
PYTHON ?= python3.11 python3.12 python3.13
FIRST_PYTHON = $(firstword $(foreach python,$(PYTHON),$(shell $(python) -c "import ensurepip, venv" 2>/dev/null && echo $(python))))
GPU_PYTHON ?= python
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SEED   ?= 0
ENGINE ?= vllm
MODEL  ?= qwen3
SGLANG := .venv-sglang
LAUNCH := .venv-launch
DOCS   := .venv-docs
OPENENV := .venv-openenv
VERIFIERS := .venv-verifiers
PINS   := .venv-pins
MIRROR ?= .cache/gpu-mirror
MIRROR_PYTHON ?= $(firstword $(shell command -v python3.12) $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python))
TE     := $(PINS)/transformer_engine_python
SITE   := build/docs
PEERS  := .cache/peers
AGENTS := .cache/agents-sdk
GATE   := $(wildcard tests/gate)
FAST   := not server and not e2e and not slow and not full
WORKERS ?= 2
X       ?= 10
# One more than cores, because each test without servers waits part of the time.
PARTS_WORKERS ?= 3
# Pytest's arguments for each stream. One worker, so that the others go on after a test whose process had to be ended. The folders
# hold all tests of these marks, which tests/conftest.py checks; importing the other folders would take seconds.
parts      := -n $(PARTS_WORKERS) --dist worksteal -m "not full and not server and not e2e" --ignore tests/lint
runs       := -n 1 -m "not full and e2e" tests/e2e tests/launch
servers    := -n 1 -m "not full and server and not e2e" tests/server
LONG       := full and not slurm and not alone and not fast_clock
full-runs  := -n 1 $(ARGS) -m "$(LONG) and e2e" tests/e2e tests/launch
full-parts := -n 1 $(ARGS) -m "$(LONG) and not e2e"
full-alone := -n 1 -m "full and alone"
streams     = $(foreach name,$(1),--stream $(name) '$($(name))')

# Install torch from a wheel below PIP_FIND_LINKS if there is one, else PyTorch's own CPU build.
UV_ENV := UV_FIND_LINKS="$(PIP_FIND_LINKS)" $(if $(wildcard $(addsuffix /torch-*.whl,$(PIP_FIND_LINKS))),,UV_TORCH_BACKEND=cpu)

# The GPU images' Megatron-Core requires Python 3.12. Where 3.12 or a torch for it is missing, 3.11 is used without that guard.
PINS_PYTHON ?= $(shell python3.12 -c "" 2>/dev/null \
  && test -z "$(filter-out $(wildcard $(addsuffix /torch-*-cp312-*.whl,$(PIP_FIND_LINKS))),$(wildcard $(addsuffix /torch-*.whl,$(PIP_FIND_LINKS))))" \
  && echo python3.12 || echo $(FIRST_PYTHON))

.PHONY: demo demo-plan smollm distill sglang launch openenv verifiers agents-sdk ablation ablation-off-policy bench race docs docs-links test test-parts test-runs test-servers test-fast test-full test-pressure test-portable test-slurm test-gpu \
  test-pins test-pins-ci test-te gpu-rehearsal chaos mutants slow rehearsal check lint types format pins clean

demo: DEMO = $(if $(filter qwen3,$(MODEL)),,$(MODEL)-)seed-$(SEED)
demo: demo-plan $(READY) $(if $(filter sglang,$(ENGINE)),$(SGLANG)/.ready)
	$(BIN)/python -m examples.arithmetic.base_model --seed $(SEED) --model $(MODEL) --out .cache/demo/$(DEMO)
	$(BIN)/tepo train examples/demo.yaml --seed $(SEED) --name demo-$(if $(filter vllm,$(ENGINE)),,$(ENGINE)-)$(DEMO) --overwrite true \
	  --rollout.engine $(ENGINE) \
	  --model.path .cache/demo/$(DEMO) \
	  --data.train .cache/demo/$(DEMO)/train.jsonl --data.eval .cache/demo/$(DEMO)/eval.jsonl

demo-plan:
	@echo "make demo, on two quiet cores:"
	@echo "  1. sets up $(VENV)$(if $(filter sglang,$(ENGINE)), and $(SGLANG)), once: minutes if packages must be downloaded"
	@echo "  2. builds a base model that can work arithmetic out but mostly guesses, once: about 2 minutes"
	@echo "  3. starts two Megatron-Core ranks and one $(ENGINE) server, and trains 40 steps with TEPO: about 3 minutes"
	@echo "  4. draws the curves, and says where they are"

# A published model, SmolLM2-135M-Instruct, learns a published task, sums of reasoning-gym.
smollm: $(READY) $(if $(filter sglang,$(ENGINE)),$(SGLANG)/.ready)
	$(BIN)/python -m examples.smollm.model --out .cache/smollm/SmolLM2-135M-Instruct
	$(BIN)/tepo train examples/reasoning_gym.yaml --seed $(SEED) --name smollm-$(if $(filter vllm,$(ENGINE)),,$(ENGINE)-)seed-$(SEED) \
	  --overwrite true --rollout.engine $(ENGINE)

# The demo's base model learns from the model that it was before it was spoiled, instead of from a reward. FORM=full: with the
# exact KL over the whole vocabulary.
distill: $(READY)
	$(BIN)/python -m examples.arithmetic.base_model --seed $(SEED) --out .cache/demo/seed-$(SEED)
	$(BIN)/tepo train examples/distill$(FORM:%=_%).yaml --seed $(SEED) --name distill$(FORM:%=-%)-seed-$(SEED) --overwrite true \
	  --model.path .cache/demo/seed-$(SEED) --objective.ref_kl.path .cache/demo/seed-$(SEED)/teacher \
	  --data.train .cache/demo/seed-$(SEED)/train.jsonl --data.eval .cache/demo/seed-$(SEED)/eval.jsonl

# Every run starts from the base model of seed 0.
ablation: $(READY)
	$(BIN)/python -m examples.arithmetic.base_model --seed 0 --out .cache/demo/seed-0
	$(BIN)/tepo ablate examples/ablation.yaml

# Compare seven methods where clips and penalties act; an hour on 2 cores. A run that is finished is not made again.
ablation-off-policy: $(READY)
	$(BIN)/python -m examples.arithmetic.base_model --seed 0 --max-operations 8 --out .cache/long/seed-0
	$(BIN)/tepo ablate examples/ablation_off_policy.yaml

# Measure this project and its peers, which have a folder of their own. Half an hour, on a machine that does nothing else.
bench: $(READY) $(PEERS)/.ready
	$(BIN)/python -m benchmarks --peers $(PEERS)

# make smollm against TRL's GRPOTrainer on the same task, model, samples and optimizer steps. Half an hour, on a machine that
# does nothing else. ARGS: --repeats 1
race: $(READY) $(PEERS)/.ready
	$(BIN)/python -m examples.smollm.model --out .cache/smollm/SmolLM2-135M-Instruct
	$(BIN)/python -m benchmarks.race --peers $(PEERS) $(ARGS)

# SGLang has its own environment, because its pins contradict vLLM's.
sglang: $(SGLANG)/.ready

# The launcher has its own environment; training needs none of NeMo-Run's dependencies (docs/launch.md).
launch: $(LAUNCH)/.ready

# OpenEnv's server has its own environment, for one long test (docs/agents.md).
openenv: $(OPENENV)/.ready

# Verifiers has its own environment, for one long test (docs/agents.md).
verifiers: $(VERIFIERS)/.ready

# The openai-agents SDK has a folder of its own, for one long test.
agents-sdk: $(AGENTS)/.ready

# Warnings are errors: a missing link, anchor or page fails the build.
docs: $(DOCS)/.ready
	$(DOCS)/bin/sphinx-build --fail-on-warning --keep-going --fresh-env --quiet -c docs -d $(SITE)/.doctrees -b html . $(SITE)
	@echo "written: $(SITE)/index.html"

# Check the links to other sites; needs a network.
docs-links: $(DOCS)/.ready
	$(DOCS)/bin/sphinx-build --quiet -c docs -d $(SITE)/.doctrees -b linkcheck . $(SITE)/links

# Run three streams of tests at once, because each waits part of the time: tests without servers, whole runs, servers.
test: $(READY) $(SGLANG)/.ready $(LAUNCH)/.ready
	$(BIN)/python -m tests.running $(if $(RECORD),--record $(RECORD)) $(call streams,parts runs servers)

# The same next to a busy loop per core, at the same priority.
test-pressure: $(READY) $(SGLANG)/.ready $(LAUNCH)/.ready
	@loops=; trap 'kill $$loops' EXIT; \
	for core in $$(seq $$(nproc)); do timeout 3h $(BIN)/python -c "while True: pass" & loops="$$loops $$!"; done; \
	$(MAKE) --no-print-directory test

# Run the numerical tests as on other kinds of CPUs, and with another number of threads. KINDS: some of these only.
KINDS ?= default/SSE41/1 avx2/AVX2/2 $(if $(shell grep -m 1 avx512f /proc/cpuinfo),avx512/AVX512_CORE/2)
test-portable: $(READY)
	set -e; for kind in $(KINDS); do IFS=/ read -r vectors isa threads <<< "$$kind"; \
	echo "ATEN_CPU_CAPABILITY=$$vectors ONEDNN_MAX_CPU_ISA=$$isa, threads of BLAS: $$threads"; \
	ATEN_CPU_CAPABILITY=$$vectors ONEDNN_MAX_CPU_ISA=$$isa OMP_NUM_THREADS=$$threads MKL_NUM_THREADS=$$threads \
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS) -m "not full" tests/gate tests/parallel tests/unit/losses tests/unit/ops; done

test-parts: $(READY) $(LAUNCH)/.ready
	$(BIN)/python -m tests.running $(call streams,parts)

test-runs: $(READY) $(SGLANG)/.ready $(LAUNCH)/.ready
	$(BIN)/python -m tests.running $(call streams,runs)

test-servers: $(READY) $(SGLANG)/.ready
	$(BIN)/python -m tests.running $(call streams,servers)

# Run the long tests in the same streams, servers among the runs. ARGS: --rotate 6 runs a sixth of them, others at each commit.
test-full: $(READY) $(SGLANG)/.ready $(LAUNCH)/.ready $(OPENENV)/.ready $(VERIFIERS)/.ready $(AGENTS)/.ready
	$(BIN)/python -m tests.running $(call streams,full-runs full-parts) --then full-alone '$(full-alone)'

# Whole runs whose clock is X times as fast as their processors: everything takes X times as long as limits know. Needs:
# apt-get install faketime gcc. ARGS: -k vllm
slow: $(READY) $(SGLANG)/.ready
	$(BIN)/python -m tests.fast_clock.clock $(X) tests/fast_clock $(ARGS)

# The service of the 14B recipe on 64 GPUs at full size, with scripted engines and ranks. Needs the same packages.
rehearsal: $(READY)
	$(BIN)/python -m tests.fast_clock.clock 20 tests/rehearsal -s $(ARGS)

# Needs root and: apt-get install slurm-wlm munge
test-slurm: $(READY) $(LAUNCH)/.ready
	$(BIN)/python -m pytest -m slurm

test-fast: $(READY) $(LAUNCH)/.ready
	$(BIN)/python -m pytest -n $(PARTS_WORKERS) -m "$(FAST)"

# Run test-fast with the GPU images' Megatron-Core, and the tests with Transformer Engine. ARGS: more arguments of pytest
test-pins: $(PINS)/.ready $(LAUNCH)/.ready test-te
	$(PINS)/bin/python -m pytest -n $(WORKERS) -m "$(FAST)" $(ARGS)

# Run the tests with Transformer Engine's Python, whose compiled parts are replaced. A separate process, because the other
# tests hide Transformer Engine.
test-te: $(TE)/.ready
	$(PINS)/bin/python -m pytest tests/transformer_engine --confcutdir=tests/transformer_engine

# .ci/run calls this: the tests with Transformer Engine, and the gate without the cases that test-full runs.
test-pins-ci: test-te
	$(if $(GATE),$(PINS)/bin/python -m pytest -n $(WORKERS) -m "not full" $(GATE))

# Kill processes of short runs with both engines at random, 100 times; takes hours. Adds the trials that the file lacks.
# ARGS: --minutes 30
chaos: $(READY) $(SGLANG)/.ready
	nice -n 10 $(BIN)/python -m tests.harness.chaos --trials 100 --out benchmarks/results/chaos.jsonl $(ARGS)

# Put each published or own silent bug into a copy of the tree, and run the tests that must catch it.
# ARGS: --only NAME, --sample 6, --write (the table, as docs/mutants.md)
mutants: $(READY) $(SGLANG)/.ready
	$(BIN)/python -m tests.mutants --workers $(WORKERS) $(ARGS)

# Run on a machine with a GPU, in the active environment. A separate process, because the other tests hide the GPU.
test-gpu:
	$(GPU_PYTHON) -m pytest tests/gpu --confcutdir=tests/gpu

# Run the GPU check without a GPU: with the packages of the machine that is lent for it, without a network, with a fake CUDA.
# Needs root, Python 3.12 and, once, 5 GB of packages. MIRROR: their folder. ARGS: arguments of the check
gpu-rehearsal: $(MIRROR)/.ready
	benchmarks/gpu/rehearsal/run.sh $(MIRROR)/bin/python tools/gpu_check.py --out build/gpu_rehearsal $(ARGS)

check: lint types test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n $(WORKERS) -q tests/lint

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The markers hold the checksum of the inputs, so a touched but unchanged file installs nothing.
$(READY): pyproject.toml requirements/cpu.txt
	@$(UV_ENV) PYTHON="$(PYTHON)" EDITABLE=1 requirements/venv.sh $(VENV) requirements/cpu.txt pyproject.toml

# SGLang's environment holds this package for its weight loader (wire/receiver/sglang_loader.py).
$(SGLANG)/.ready: requirements/sglang-cpu.txt
	@$(UV_ENV) PYTHON="$(PYTHON)" EDITABLE=1 requirements/venv.sh $(SGLANG) $<

$(LAUNCH)/.ready: requirements/launch.txt
	@PYTHON="$(PYTHON)" requirements/venv.sh $(LAUNCH) $<

$(OPENENV)/.ready: requirements/openenv.txt
	@PYTHON="$(PYTHON)" requirements/venv.sh $(OPENENV) $<

$(DOCS)/.ready: requirements/docs.txt
	@PYTHON="$(PYTHON)" requirements/venv.sh $(DOCS) $<

# The CPU's packages, with the Megatron-Core of the GPU images.
$(PINS)/.ready: pyproject.toml requirements/cpu.txt requirements/gpu-vllm.txt
	@sum=$$(cat pyproject.toml requirements/cpu.txt requirements/gpu-vllm.txt | sha256sum); \
	if [ "$$(cat $@ 2>/dev/null)" = "$$sum" ]; then touch $@; exit 0; fi; \
	set -e; \
	echo "setting up $(PINS) with $(PINS_PYTHON) (once; some minutes if packages must be downloaded)"; \
	test -x $(PINS)/bin/python || $(PINS_PYTHON) -m venv $(PINS); \
	$(PINS)/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.9"; \
	grep -v '^megatron-core==' requirements/cpu.txt > $(PINS)/requirements.txt; \
	$(UV_ENV) $(PINS)/bin/uv pip install --no-config --python $(PINS)/bin/python --no-deps --quiet --compile-bytecode -r $(PINS)/requirements.txt; \
	$(PINS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
	  "$$(grep '^megatron-core==' requirements/gpu-vllm.txt)"; \
	$(PINS)/bin/uv pip install --no-config --python $(PINS)/bin/python --no-deps --quiet --editable .; \
	echo "$$sum" > $@

# The Python part of the GPU images' Transformer Engine, the only one of its three wheels without compiled code. It has a folder
# of its own, which only tests/transformer_engine uses.
$(TE)/.ready: $(PINS)/.ready requirements/gpu-vllm.txt
	rm -rf $(TE)
	$(PINS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $(TE) \
	  "$$(grep '^transformer-engine==' requirements/gpu-vllm.txt)"
	touch $@

$(MIRROR)/.ready: requirements/gpu-mirror.txt requirements/gpu-check.txt
	@sum=$$(cat $^ | sha256sum); \
	if [ "$$(cat $@ 2>/dev/null)" = "$$sum" ]; then touch $@; exit 0; fi; \
	set -e; \
	echo "setting up $(MIRROR) (once; some minutes if packages must be downloaded)"; \
	$(MAKE) --no-print-directory $(READY); \
	test -x $(MIRROR)/bin/python || $(MIRROR_PYTHON) -m venv --without-pip $(MIRROR); \
	$(BIN)/uv pip install --no-config --python $(MIRROR)/bin/python --quiet --compile-bytecode -r requirements/gpu-mirror.txt; \
	$(BIN)/uv pip install --no-config --python $(MIRROR)/bin/python --no-deps --quiet --compile-bytecode -r requirements/gpu-check.txt; \
	echo "$$sum" > $@

$(VERIFIERS)/.ready: requirements/verifiers.txt
	@PYTHON="$(PYTHON)" requirements/venv.sh $(VERIFIERS) $<

$(AGENTS)/.ready: requirements/agents-sdk.txt | $(READY)
	rm -rf $(AGENTS)
	$(BIN)/uv pip install --no-config --python $(BIN)/python --no-deps --quiet --target $(AGENTS) -r $<
	touch $@

$(PEERS)/.ready: requirements/bench.txt
	@sum=$$(sha256sum < $<); \
	if [ "$$(cat $@ 2>/dev/null)" = "$$sum" ]; then touch $@; exit 0; fi; \
	set -e; \
	rm -rf $(PEERS); \
	$(MAKE) --no-print-directory $(READY); \
	$(UV_ENV) $(BIN)/uv pip install --no-config --python $(BIN)/python --no-deps --quiet --target $(PEERS) -r requirements/bench.txt; \
	echo "$$sum" > $@

# Resolve the pins again.
pins:
	test -x $(BIN)/uv || ($(FIRST_PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet "uv>=0.9")
	$(UV_ENV) $(BIN)/uv pip compile --quiet --upgrade --no-config --python-version 3.11 --no-header --no-annotate \
	  --no-emit-package tepo-megatron --override requirements/overrides.txt \
	  --extra cpu --group dev pyproject.toml -o requirements/cpu.txt
	$(UV_ENV) $(BIN)/uv pip compile --quiet --upgrade --no-config --python-version 3.11 --no-header --no-annotate \
	  requirements/sglang-cpu.in -o requirements/sglang-cpu.txt
	$(BIN)/uv pip compile --quiet --upgrade --no-config --universal --python-version 3.11 --no-header --no-annotate \
	  --override requirements/overrides.txt requirements/launch.in -o requirements/launch.txt
	$(BIN)/uv pip compile --quiet --upgrade --no-config --python-version 3.11 --no-header --no-annotate \
	  requirements/docs.in -o requirements/docs.txt
	$(BIN)/uv pip compile --quiet --upgrade --no-config --universal --python-version 3.11 --no-header --no-annotate \
	  requirements/openenv.in -o requirements/openenv.txt
	$(BIN)/uv pip compile --quiet --upgrade --no-config --universal --python-version 3.11 --no-header --no-annotate \
	  requirements/verifiers.in -o requirements/verifiers.txt
	for engine in vllm sglang; do \
	  $(BIN)/uv pip compile --quiet --upgrade --no-config --python-version 3.12 --python-platform x86_64-manylinux_2_34 --no-header \
	    --no-annotate --no-emit-package tepo-megatron --constraint requirements/gpu-constraints.txt --extra $$engine --extra te --extra datasets \
	    --extra tensorboard --extra wandb --extra test pyproject.toml -o requirements/gpu-$$engine.txt || exit 1; \
	done
	sed -n 's/^# *\(sglang==.*\)/\1/p' requirements/sglang-cpu.in >> requirements/sglang-cpu.txt  # without its dependencies
	sed -i 's/+cpu$$//' requirements/cpu.txt requirements/sglang-cpu.txt  # a local version would bind the pin to one source of wheels

clean:
	rm -rf $(VENV) $(SGLANG) $(LAUNCH) $(DOCS) $(OPENENV) $(VERIFIERS) $(PINS) build .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
