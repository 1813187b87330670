# Two commands matter: `make demo` runs the main job, `make test` runs the tests.
# Both set up their own virtual environment the first time and are quick after that.

PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
# Options for the demo's recipe, e.g. make demo ARGS="--max_steps 50"
ARGS ?=
# Options for pytest, e.g. make test PYTEST_ARGS="-k alias"
PYTEST_ARGS ?=

# CUDA users keep the torch that their machine gives; everybody else gets the tested CPU release.
CONSTRAINTS ?= $(if $(shell command -v nvidia-smi 2>/dev/null),constraints/tested.txt,constraints/cpu.txt)

# DeepSpeed compiles small C++ ops on first use. One folder per environment keeps builds for different torch
# releases apart; ninja is found in the environment.
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
export PATH := $(BIN):$(PATH)

.PHONY: demo test test-slow lint setup clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train the scaled-down GLM-4.5-Air in two processes and draw its chart"
	@echo "make test       linters, type checks and the default test-suite"
	@echo "make test-slow  the tests that the default suite leaves out"
	@echo "make setup      only the virtual environment"

$(VENV)/.installed: pyproject.toml constraints/cpu.txt constraints/tested.txt
	@echo "Setting up $(VENV) with $(CONSTRAINTS) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[recipes,dashboards,test]"
	@echo "Compiling DeepSpeed's communication op for CPU runs, once (about half a minute) ..."
	$(BIN)/python -c "from lightning_zero3 import cpu_ops; cpu_ops.build()"
	@touch $@

setup: $(VENV)/.installed

demo: setup
	$(BIN)/python recipes/glm45air.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) runs build dist .mypy_cache .ruff_cache .pytest_cache
