# make demo | test | test-all | lint | setup | clean. Each does its own set-up.
PYTHON ?= python3
BIN := .venv/bin
# One thread a process: llama.cpp spins at barriers and slows several-fold when threads outnumber cores.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE = 1
DEMO ?=

.PHONY: demo test test-all lint setup setup-dev clean

setup:
	@$(PYTHON) packaging/bootstrap.py coordinator,learner,node

setup-dev:
	@$(PYTHON) packaging/bootstrap.py coordinator,dev,learner,node

demo: setup
	@$(BIN)/echo2 demo $(DEMO)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p echo2
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest -m "not slow"

test-all: lint
	$(BIN)/pytest

clean:
	rm -rf .venv build dist *.egg-info demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
