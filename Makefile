# Every target does its own set-up: a virtual environment in the checkout, snapshots in ASSAY_HOME. `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help setup models parity test goldens bench report notebooks mutate sweep lint lock clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## build the virtual environment from the lock file

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --require-hashes --only-binary :all: -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

models: setup ## fetch and build the default snapshots
	$(BIN)/assay models fetch

parity: models ## the main job: the engine against the committed goldens of this platform
	$(BIN)/assay record --if-none
	$(BIN)/assay check

test: models ## all tests
	$(BIN)/python -m pytest

goldens: models ## rebuild every golden from nothing, in the oracle's own environment
	$(BIN)/assay record

bench: models ## engine, mlx-lm and llama.cpp side by side: the whole table, into reports/bench.md
	$(BIN)/assay bench --full --noisy
	$(BIN)/assay bench --samplers
	$(BIN)/python -m pytest tests/bench/pieces.py

report: setup ## one page of the last check, bench, mutation and sweep: reports/report.html
	$(BIN)/assay report

notebooks: models ## execute the notebooks and render them into reports/notebooks
	$(BIN)/python -m parity.reporting.notebooks notebooks reports/notebooks

mutate: models ## plant every fault of the catalogue in the engine; the gate must catch them all
	$(BIN)/assay mutate

sweep: models ## invariances of the engine and of the oracles, and of a pair of versions
	$(BIN)/assay sweep --oracle engine --oracle mlx-lm --oracle mlx-optiq --oracle mlx-lm==0.31.3 --markdown reports/sweep.md

lint: setup ## format, lint and type checks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

lock: setup ## compile requirements.lock anew from pyproject.toml
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --extra dev -o requirements.lock pyproject.toml

clean: ## remove what the targets made in the checkout
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
