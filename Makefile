# Every target sets itself up: a virtual environment with pinned packages, re-used while nothing changed.
SHELL := bash
# The first of these that is there, with venv and a wheel of every pin.
PYTHON ?= python3.11 python3.12 python3.13
SEED   ?= 0
ENGINE ?= vllm
MODEL  ?= qwen3
X      ?= 10
WORKERS ?= 2
# One more than cores, because each test without servers waits part of the time.
PARTS_WORKERS ?= 3

VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SGLANG := .venv-sglang/.ready
LAUNCH := .venv-launch/.ready
OTHERS := .venv-openenv/.ready .venv-verifiers/.ready .cache/agents-sdk/.ready
PINS   := .venv-pins
TE     := $(PINS)/transformer_engine_python
PEERS  := .cache/peers
MIRROR ?= .cache/gpu-mirror
MIRROR_PYTHON ?= $(firstword $(foreach python,python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python),$(shell $(python) -c "import venv" 2>/dev/null && echo $(python))))
SITE   := build/docs
SERVED := $(READY) $(if $(filter sglang,$(ENGINE)),$(SGLANG))
NAMED   = $(if $(filter vllm,$(ENGINE)),,$(ENGINE)-)

# Pytest's arguments for each stream. One worker, so that the others go on after a test whose process had to be ended. The folders
# hold all tests of these marks, which tests/conftest.py checks; importing the other folders would take seconds.
FAST       := not server and not e2e and not slow and not full
LONG       := full and not slurm and not alone and not fast_clock
parts      := -n $(PARTS_WORKERS) --dist worksteal -m "not full and not server and not e2e" --ignore tests/lint
runs       := -n 1 -m "not full and e2e" tests/e2e tests/launch
servers    := -n 1 -m "not full and server and not e2e" tests/server
full-runs  := -n 1 $(ARGS) -m "$(LONG) and e2e" tests/e2e tests/launch
full-parts := -n 1 $(ARGS) -m "$(LONG) and not e2e"
full-alone := -n 1 -m "full and alone"
streams     = $(BIN)/python -m tests.running $(if $(RECORD),--record $(RECORD)) $(foreach name,$(1),--stream $(name) '$($(name))')

# Install torch from a wheel below PIP_FIND_LINKS if there is one, else PyTorch's own CPU build.
UV_ENV := UV_FIND_LINKS="$(PIP_FIND_LINKS)" $(if $(wildcard $(addsuffix /torch-*.whl,$(PIP_FIND_LINKS))),,UV_TORCH_BACKEND=cpu)
SETUP  := $(UV_ENV) PYTHON="$(PYTHON)" requirements/venv.sh

# Targets, all but files
.PHONY: $(shell sed -n 's/^\([a-z][a-z -]*\):\( .*\|\)$$/\1/p' Makefile)

demo: DEMO = $(if $(filter qwen3,$(MODEL)),,$(MODEL)-)seed-$(SEED)
demo: demo-plan $(SERVED)
	$(BIN)/python -m examples.arithmetic.base_model --seed $(SEED) --model $(MODEL) --out .cache/demo/$(DEMO)
	$(BIN)/tepo train examples/demo.yaml --seed $(SEED) --name demo-$(NAMED)$(DEMO) --overwrite true --rollout.engine $(ENGINE) \
	  --model.path .cache/demo/$(DEMO) --data.train .cache/demo/$(DEMO)/train.jsonl --data.eval .cache/demo/$(DEMO)/eval.jsonl

demo-plan:
	@echo "make demo, on two quiet cores:"
	@echo "  1. sets up $(VENV)$(if $(filter sglang,$(ENGINE)), and .venv-sglang), once: minutes if packages must be downloaded"
	@echo "  2. builds a base model that can work arithmetic out but mostly guesses, once: about 2 minutes"
	@echo "  3. starts two Megatron-Core ranks and one $(ENGINE) server, and trains 40 steps with TEPO: about 3 minutes"
	@echo "  4. draws the curves, and says where they are"

# A published model, SmolLM2-135M-Instruct, learns a published task, sums of reasoning-gym.
smollm: $(SERVED)
	$(BIN)/python -m examples.smollm.model --out .cache/smollm/SmolLM2-135M-Instruct
	$(BIN)/tepo train examples/reasoning_gym.yaml --seed $(SEED) --name smollm-$(NAMED)seed-$(SEED) --overwrite true --rollout.engine $(ENGINE)

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

# Environments of their own: SGLang's pins contradict vLLM's, the launcher needs no training, and the rest is for one test each.
sglang launch openenv verifiers: %: .venv-%/.ready

agents-sdk: .cache/agents-sdk/.ready

# Warnings are errors: a missing link, anchor or page fails the build. docs-links checks links to other sites; needs a network.
docs docs-links: .venv-docs/.ready
	.venv-docs/bin/sphinx-build $(if $(filter docs,$@),--fail-on-warning --keep-going --fresh-env) --quiet -c docs -d $(SITE)/.doctrees \
	  -b $(if $(filter docs,$@),html . $(SITE),linkcheck . $(SITE)/links)
	@$(if $(filter docs,$@),echo "written: $(SITE)/index.html")

# Three streams of tests at once, because each waits part of the time: tests without servers, whole runs, servers.
test: $(READY) $(SGLANG) $(LAUNCH)
	$(call streams,parts runs servers)

test-parts test-runs test-servers: test-%: $(READY) $(SGLANG) $(LAUNCH)
	$(call streams,$*)

test-fast: $(READY) $(LAUNCH)
	$(BIN)/python -m pytest -n $(PARTS_WORKERS) -m "$(FAST)"

# The long tests in the same streams, servers among the runs. ARGS: --rotate 6 runs a sixth of them, others at each commit.
test-full: $(READY) $(SGLANG) $(LAUNCH) $(OTHERS)
	$(call streams,full-runs full-parts) --then full-alone '$(full-alone)'

# make test next to a busy loop per core, at the same priority.
test-pressure: $(READY) $(SGLANG) $(LAUNCH)
	@loops=; trap 'kill $$loops' EXIT; \
	for core in $$(seq $$(nproc)); do timeout 3h $(BIN)/python -c "while True: pass" & loops="$$loops $$!"; done; \
	$(MAKE) --no-print-directory test

# The numerical tests as on other kinds of CPUs, and with another number of threads. KINDS: some of these only.
KINDS ?= default/SSE41/1 avx2/AVX2/2 $(if $(shell grep -m 1 avx512f /proc/cpuinfo),avx512/AVX512_CORE/2)
test-portable: $(READY)
	set -e; for kind in $(KINDS); do IFS=/ read -r vectors isa threads <<< "$$kind"; \
	echo "ATEN_CPU_CAPABILITY=$$vectors ONEDNN_MAX_CPU_ISA=$$isa, threads of BLAS: $$threads"; \
	ATEN_CPU_CAPABILITY=$$vectors ONEDNN_MAX_CPU_ISA=$$isa OMP_NUM_THREADS=$$threads MKL_NUM_THREADS=$$threads \
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS) -m "not full" tests/gate tests/parallel tests/unit/losses tests/unit/ops; done

# Whole runs whose clock is X times as fast as their processors: everything takes X times as long as limits know. Needs:
# apt-get install faketime gcc. ARGS: -k vllm
slow: $(READY) $(SGLANG)
	$(BIN)/python -m tests.fast_clock.clock $(X) tests/fast_clock $(ARGS)

# The service of the 14B recipe on 64 GPUs at full size, with scripted engines and ranks. Needs the same packages.
rehearsal: $(READY)
	$(BIN)/python -m tests.fast_clock.clock 20 tests/rehearsal -s $(ARGS)

# Needs root and: apt-get install slurm-wlm munge
test-slurm: $(READY) $(LAUNCH)
	$(BIN)/python -m pytest -m slurm

# test-fast with the GPU images' Megatron-Core, and the tests with Transformer Engine. ARGS: more arguments of pytest
test-pins: $(PINS)/.ready $(LAUNCH) test-te
	$(PINS)/bin/python -m pytest -n $(WORKERS) -m "$(FAST)" $(ARGS)

# Tests with Transformer Engine's Python, whose compiled parts are replaced. A separate process, because the others hide it.
test-te: $(TE)/.ready
	$(PINS)/bin/python -m pytest tests/transformer_engine --confcutdir=tests/transformer_engine

# .ci/run calls this: the tests with Transformer Engine, and the gate without the cases that test-full runs.
test-pins-ci: test-te
	$(PINS)/bin/python -m pytest -n $(WORKERS) -m "not full" tests/gate

# Kill processes of short runs with both engines at random, 100 times; takes hours. Adds the trials that the file lacks.
# ARGS: --minutes 30
chaos: $(READY) $(SGLANG)
	nice -n 10 $(BIN)/python -m tests.harness.chaos --trials 100 --out benchmarks/results/chaos.jsonl $(ARGS)

# Put each published or own silent bug into a copy of the tree, and run the tests that must catch it.
# ARGS: --only NAME, --sample 6, --write (the table, as docs/mutants.md)
mutants: $(READY) $(SGLANG)
	$(BIN)/python -m tests.mutants --workers $(WORKERS) $(ARGS)

# On a machine with a GPU, in the active environment. A separate process, because the other tests hide the GPU.
test-gpu:
	python -m pytest tests/gpu --confcutdir=tests/gpu

# The GPU check without a GPU: with the packages of the machine that is lent for it, without a network, with a fake CUDA.
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

# .venv/bin/tepo of this checkout; again after git pull.
install: $(READY)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Resolve the pins again.
pins: $(READY)
	$(UV_ENV) requirements/compile.sh $(BIN)/uv

clean:
	rm -rf $(VENV) .venv-* build .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Environments. Their markers hold the checksum of the inputs, so a touched but unchanged file installs nothing.
$(READY): pyproject.toml requirements/cpu.txt
	@EDITABLE=1 $(SETUP) $(VENV) requirements/cpu.txt pyproject.toml

# SGLang's environment holds this package for its weight loader (wire/receiver/sglang_loader.py).
$(SGLANG): requirements/sglang-cpu.txt
	@EDITABLE=1 $(SETUP) $(@D) $<

.venv-%/.ready: requirements/%.txt
	@$(SETUP) $(@D) $<

# The CPU's packages, with the Megatron-Core of the GPU images. It requires Python 3.12, and is used without that guard where
# 3.12 or a torch for it is missing.
$(PINS)/.ready: pyproject.toml requirements/cpu.txt requirements/gpu-vllm.txt
	@mkdir -p build; grep -v '^megatron-core==' requirements/cpu.txt > build/pins.txt
	@EDITABLE=1 OTHER="$$(grep '^megatron-core==' requirements/gpu-vllm.txt)" $(UV_ENV) PYTHON="python3.12 $(filter-out python3.12,$(PYTHON))" \
	  requirements/venv.sh $(PINS) build/pins.txt $^

# The Python part of the GPU images' Transformer Engine, the only one of its three wheels without compiled code. It has a folder
# of its own, which only tests/transformer_engine uses.
$(TE)/.ready: requirements/gpu-vllm.txt $(PINS)/.ready
	@grep '^transformer-engine==' $< > build/te.txt
	@requirements/target.sh $(PINS)/bin $(@D) build/te.txt

.cache/agents-sdk/.ready: requirements/agents-sdk.txt | $(READY)
	@requirements/target.sh $(BIN) $(@D) $<

$(PEERS)/.ready: requirements/bench.txt | $(READY)
	@$(UV_ENV) requirements/target.sh $(BIN) $(@D) $<

$(MIRROR)/.ready: requirements/gpu-mirror.txt requirements/gpu-check.txt | $(READY)
	test -x $(MIRROR)/bin/python || $(MIRROR_PYTHON) -m venv --without-pip $(MIRROR)
	$(BIN)/uv pip install --no-config --python $(MIRROR)/bin/python --quiet --compile-bytecode -r requirements/gpu-mirror.txt
	$(BIN)/uv pip install --no-config --python $(MIRROR)/bin/python --no-deps --quiet --compile-bytecode -r requirements/gpu-check.txt
	touch $@
