# Python that .venv is made from, 3.10 to 3.13. Given explicitly, it replaces a .venv of another version.
PYTHON ?= python3
# What `make demo` runs, and where its artifact goes.
MODEL ?= smollm2-135m
BITS ?= 4
OUT ?= artifacts/demo

BIN := .venv/bin
SETUP_FLAGS := $(if $(filter file default,$(origin PYTHON)),,--match-python)

# Tests never reach for a hub: a missing file must fail at once, not after a timeout.
test test-full: export HF_HUB_OFFLINE := 1
test test-full demo: export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full bench check lint format types floors clean

help: ## Show the targets
	@echo "Targets (each installs what it needs into .venv first):"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{ printf "  %-10s %s\n", $$1, $$2 }'

setup: ## Create .venv with the locked versions; nothing to do when it is up to date
	@command -v $(PYTHON) >/dev/null || { echo "setup: '$(PYTHON)' was not found. Install Python 3.10 to 3.13, or name one: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) tools/setup.py $(SETUP_FLAGS)

demo: setup ## Export a real model at 4 bits to artifacts/demo (MODEL=, BITS=, OUT= change that)
	$(BIN)/tieq export --model $(MODEL) --bits $(BITS) --out $(OUT)

test: setup ## Run the tests but the slow ones
	$(BIN)/python -m pytest -m "not slow"

test-full: setup ## Run all tests
	$(BIN)/python -m pytest

bench: setup ## Speed and memory beside the peers, about 40 minutes; writes docs/benchmarks.md
	$(BIN)/python -m benchmarks.speed

check: lint types floors ## Lint, format, types and architecture, changing nothing

lint: setup ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy --strict on src/tieq
	$(BIN)/mypy

floors: setup ## Who may import whom
	$(BIN)/python -m pytest -q tests/test_floors.py

format: setup ## Rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv, caches and builds; artifacts stay
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
