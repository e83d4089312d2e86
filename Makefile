# What there is to do here; `make` alone lists it. Each target first sets up .venv, and again only when
# pyproject.toml or constraints.txt changed.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test soak lint bench results docs clean

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
EXTRAS := display,doctor,examples,test,lint

help:  ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(READY)  ## make .venv with everything the other targets need

demo: $(READY)  ## train a small classifier on two workers
	@echo "== two workers train examples/digits.py"
	@$(BIN)/echelon train examples/digits.py --plan dp --workers 2

test: lint  ## the checks, then every test: what CI runs
	@echo "== pytest"
	@$(BIN)/python -m pytest

soak: $(READY)  ## the long campaigns against the backend: thousands of random operations, hundreds of deaths
	@$(BIN)/python -m pytest -m soak

lint: $(READY)  ## ruff, mypy and the layers
	@echo "== ruff check"
	@$(BIN)/ruff check
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check
	@echo "== mypy, strict on src"
	@$(BIN)/mypy
	@echo "== the layers"
	@$(BIN)/lint-imports --no-logo

bench: $(READY)  ## run every benchmark and print what it claims
	@$(BIN)/python benchmarks/results.py

results: $(READY)  ## run every benchmark and write docs/results.md
	@$(BIN)/python benchmarks/results.py --write docs/results.md

docs: $(READY)  ## check that links in the documentation resolve and its Python compiles
	@$(BIN)/python tools/check_docs.py

clean:  ## remove caches and build output; .venv and runs/ stay
	rm -rf build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks examples tools -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# torch goes first and by its exact version: an open range may draw in a build with gigabytes of CUDA packages.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Echelon needs Python 3.11 or newer; say which one with: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	@test -x $(BIN)/python || { echo "== making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; }
	@echo "== installing torch $$(sed -n 's/^torch==//p' constraints.txt) into .venv (the first time some minutes)"
	@$(BIN)/python -m pip install -qq -c constraints.txt "$$(grep '^torch==' constraints.txt)" "$$(grep '^setuptools==' constraints.txt)"
	@echo "== installing Echelon and what its tests and checks need"
	@$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $(READY)
