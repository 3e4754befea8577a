# The project's commands; `make help` lists them. All of them work in a fresh clone.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
INSTALLED := .venv/.installed
# Without torch and vLLM. The commands below that need neither use what is installed.
LIGHT := .venv/.installed-light
IS_LIGHT := $(or $(wildcard $(LIGHT)),$(filter install-light,$(MAKECMDGOALS)))
TOOLS := $(if $(IS_LIGHT),$(LIGHT),$(INSTALLED))
# Without vLLM, mypy can check less.
TYPES := types$(if $(IS_LIGHT),-light)

# The first of these that is Python 3.11 or newer. (A pyenv shim can exist and yet not run.)
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON = $(shell for each in python3.11 python3; do \
	"$$each" -c '$(IS_NEW_ENOUGH)' 2>/dev/null && echo "$$each" && break; done)
endif

# pip's long listing is progress to a person and noise to a log.
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-deps \
	$(if $(MAKE_TERMOUT),,-qq)

# The npm package of the foreign client, where there is Node to run it.
FOREIGN := tests/foreign
ifneq ($(and $(wildcard $(FOREIGN)/package.json),$(shell command -v npm)),)
NODE_INSTALLED := $(FOREIGN)/node_modules/.installed
endif

.PHONY: help
help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

.PHONY: install
install: $(INSTALLED) $(NODE_INSTALLED) ## Make .venv with everything pinned (3 GB, some minutes once)

.PHONY: install-light
install-light: $(LIGHT) ## The same without torch and vLLM (0.5 GB), to work on all but the engines

.PHONY: demo
demo: $(INSTALLED) ## 200 questions to vLLM workers on this machine, checked
	@$(BIN)/tokenyard demo

TOX_PARALLEL = $(BIN)/tox run-parallel --parallel-no-spinner --parallel

.PHONY: quick
quick: $(TOOLS) ## Format, lint, types, unit tests and scripts, in two minutes
	@$(TOX_PARALLEL) 2 -m quick$(if $(IS_LIGHT),-light)

.PHONY: test
test: install programs ## What each change must pass: ten minutes on two cores
	@$(TOX_PARALLEL) 4

.PHONY: test-long
test-long: install programs-long ## All other tests, deep searches, a short run of every benchmark
	@$(TOX_PARALLEL) 2 -m long

.PHONY: test-light
test-light: $(TOOLS) ## What `make install-light` suffices for
	@$(TOX_PARALLEL) 2 -m light

.PHONY: lint
lint: $(TOOLS) ## Format, lint, types and import contracts only
	@$(BIN)/tox run -e lint,$(TYPES)

# For pre-commit, with what is installed.
.PHONY: types
types:
	@$(BIN)/tox run -q -e $(TYPES)

.PHONY: format
format: $(TOOLS) ## Format the code
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

# Without .venv and without a network, with the Python that has torch: docs/gpu.md.
GPU ?= cuda
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),python3,$(PYTHON))
.PHONY: gpu
gpu: ## Prove it on a GPU host: make gpu WHEELS=folder [GPU=cpu] [PARTS="tests chaos"]
	@[ -n "$(WHEELS)" ] || { echo "Name the folder of wheels: make gpu WHEELS=folder;" \
		"docs/gpu.md says how to fill it." >&2; exit 1; }
	@$(MAKE) --no-print-directory python PYTHON="$(GPU_PYTHON)"
	@"$(GPU_PYTHON)" .ci/gpu.py all --wheels "$(WHEELS)" --gpu "$(GPU)" $(GPU_OPTIONS) $(PARTS)

.PHONY: requirements
requirements: $(INSTALLED) ## Resolve requirements.in into requirements.txt
	@$(BIN)/python .ci/pin_requirements.py

.PHONY: clean
clean: ## Remove what `make` made
	rm -rf .venv .tox dist $(FOREIGN)/node_modules .mypy_cache .ruff_cache .pytest_cache \
		.import_linter_cache .hypothesis .gpu

$(INSTALLED): requirements.txt pyproject.toml
	@$(MAKE) --no-print-directory python libnuma
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	@echo "Installing into .venv: about 3 GB, two to four minutes."
	@$(PIP_INSTALL) -r requirements.txt
	@$(PIP_INSTALL) --no-build-isolation --editable .
	@$(BIN)/python -c 'import torch' || { echo \
		"PyTorch does not load: pip has probably chosen its CUDA build. Set PIP_EXTRA_INDEX_URL to" \
		"PyTorch's index of CPU wheels (see the install page of pytorch.org), then: make clean" \
		"install" >&2; exit 1; }
	@rm -f $(LIGHT)
	@touch $@

# The extras and the tools, at the versions in requirements.txt.
$(LIGHT): requirements.txt pyproject.toml
	@$(MAKE) --no-print-directory python
	@[ ! -f $(INSTALLED) ] || { echo "Everything is installed already." >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	@$(BIN)/python -m pip install --disable-pip-version-check $(if $(MAKE_TERMOUT),,-qq) \
		--constraint requirements.txt hatchling
	@$(BIN)/python -m pip install --disable-pip-version-check $(if $(MAKE_TERMOUT),,-qq) \
		--constraint requirements.txt --no-build-isolation --editable '.[dev]'
	@touch $@

$(FOREIGN)/node_modules/.installed: $(wildcard $(FOREIGN)/package*.json)
	@cd $(FOREIGN) && npm $(if $(wildcard $(FOREIGN)/package-lock.json),ci,install) \
		--no-audit --no-fund --no-update-notifier --loglevel=error
	@touch $@

.PHONY: python
python:
	@"$(PYTHON)" -c '$(IS_NEW_ENOUGH)' 2>/dev/null || { echo "Tokenyard needs Python 3.11 or newer" \
		"as python3.11 or python3; or name one: make PYTHON=/path/to/python ..." >&2; exit 1; }

# vLLM's CPU kernels are linked against libnuma, which no wheel carries.
HAS_LIBNUMA := import ctypes; ctypes.CDLL("libnuma.so.1")
.PHONY: libnuma
libnuma:
	@[ "$$(uname -s)" != Linux ] || "$(PYTHON)" -c '$(HAS_LIBNUMA)' 2>/dev/null || { \
		echo "vLLM needs the system library libnuma."; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && apt-get install -y -qq libnuma1; \
		else \
			echo "Please install it (Debian, Ubuntu: apt install libnuma1) and try again." >&2; \
			exit 1; \
		fi; }

# Tests that need one of these skip without it; on a CI machine nothing may be skipped.
.PHONY: programs programs-long
programs-long: NEEDED = redis-server node spin chromium promtool
programs programs-long:
	@for each in $(or $(NEEDED),node chromium); do \
		command -v "$$each" >/dev/null && continue; \
		printf '\n*** %s is not installed: its tests are SKIPPED ***\n\n' "$$each" >&2; \
		[ "$${CI:-}" != true ] || { echo "That is a failure in CI; see .ci/run." >&2; exit 1; }; \
	done
