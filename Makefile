# kvtide. `make` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-real test-demo check protos lock clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PROTO_BIN := build/proto-venv/bin
# -qq: errors only. --no-compile: most of the 4 GB are never imported.
PIP_INSTALL := pip install -qq --no-compile --disable-pip-version-check
FAST_TESTS ?=
REAL_TESTS ?= tests/suite tests/engine

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: .venv/.installed build/proto-venv/.installed ## create .venv with everything that is pinned in requirements/
	@:

.venv/.installed: pyproject.toml requirements/torch.txt requirements/lock.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "kvtide's pinned environment needs Python 3.11, and $(PYTHON) is $$($(PYTHON) --version 2>&1); try make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "install: creating .venv"
	@"$(PYTHON)" -m venv .venv
	@echo "install: torch (1 of 3)"
	@$(BIN)/$(PIP_INSTALL) -r requirements/torch.txt -c requirements/lock.txt
	@echo "install: vLLM, NIXL and the rest, 4 GB in all, about a minute (2 of 3)"
	@$(BIN)/$(PIP_INSTALL) --no-deps -r requirements/lock.txt
	@echo "install: kvtide itself, editable (3 of 3)"
	@$(BIN)/$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

build/proto-venv/.installed: requirements/protos.txt
	@echo "install: the protobuf compiler, in its own build/proto-venv"
	@"$(PYTHON)" -m venv build/proto-venv
	@$(PROTO_BIN)/$(PIP_INSTALL) -r requirements/protos.txt
	@touch $@

demo: .venv/.installed ## a real conversation over two engines, readback off and on (KEEP=1 leaves it running)
	@$(BIN)/kvtide demo $(if $(filter-out 0,$(KEEP)),--keep)

test: install ## every test, the real-engine tier included (under 20 minutes on 2 cores)
	@failed=0; \
	$(BIN)/python -m pytest --engine=fake $(FAST_TESTS) || failed=1; \
	$(BIN)/python -m pytest --engine=cpu $(REAL_TESTS) || failed=1; \
	exit $$failed

test-fast: install ## the tests that need no real engine
	@$(BIN)/python -m pytest --engine=fake $(FAST_TESTS)

test-real: install ## the tests on two real vLLM CPU engines
	@$(BIN)/python -m pytest --engine=cpu $(REAL_TESTS)

test-demo: install ## the demo itself: what it measures, Ctrl-C and kill -9 (about 8 minutes)
	@$(BIN)/python -m pytest --engine=cpu tests/local/test_demo.py

check: install ## ruff, mypy (strict), import-linter, the proto checks
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/protos

protos: install ## regenerate the stubs from protos/ (UPDATE=1: the descriptor snapshot too)
	@$(PROTO_BIN)/python -m protos.tools.generate $(if $(filter-out 0,$(UPDATE)),--update-snapshot)

lock: ## pin again what .venv has now, in requirements/lock.txt
	@$(BIN)/python requirements/lock.py

clean: ## remove .venv, build/ and caches
	@rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
