# Two commands matter: `make demo` runs the main job, `make test` runs the tests.
# Both set up their own virtual environment the first time and are quick after that.

PYTHON ?= python3
VENV ?= .venv
BIN := $(abspath $(VENV))/bin
# Options for the demo's recipe, e.g. make demo ARGS="--max_steps 50"
ARGS ?=
# Options for pytest, e.g. make test PYTEST_ARGS="-k alias"
PYTEST_ARGS ?=
# Processes that share the default suite out among themselves; each starts ranks of its own.
PYTEST_WORKERS ?= 2

# CUDA users keep the torch that their machine gives; everybody else gets the tested CPU release.
TORCH := $(if $(shell command -v nvidia-smi 2>/dev/null),,constraints/cpu.txt)
CONSTRAINTS ?= constraints/tested.txt constraints/deepspeed-0.19.8.txt $(TORCH)

# The oldest supported DeepSpeed, in an environment that takes everything else from the first one.
OLD_DEEPSPEED := constraints/deepspeed-0.19.7.txt
OLD_VENV ?= $(VENV)-oldest
OLD_BIN := $(abspath $(OLD_VENV))/bin
# One rank: gathers of 0.19.7 race with gloo on more. `make test-versions VERSIONS_ARGS=` runs all of the files.
OLD_TESTS := tests/unit/capabilities/test_capabilities.py tests/distributed/test_grad_clear.py tests/distributed/test_grad_census.py \
  tests/distributed/test_step_paths.py tests/distributed/test_master_alias.py tests/distributed/test_same_as_stock.py \
  tests/distributed/test_capabilities.py tests/distributed/test_edits.py tests/distributed/test_missing_gradients.py \
  tests/distributed/test_checkpoint.py tests/distributed/test_moving.py tests/distributed/test_layouts.py tests/distributed/test_accumulation.py \
  tests/distributed/test_manual_steps.py tests/distributed/test_resume.py tests/distributed/test_skipped_steps.py tests/unit/plan/test_structure.py \
  tests/unit/plan/test_command.py
VERSIONS_ARGS ?=

# DeepSpeed compiles small C++ ops on first use. One folder per environment keeps builds for different torch
# releases apart; ninja is found in the environment.
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
export PATH := $(BIN):$(PATH)

.PHONY: demo test test-slow test-versions lint docs setup dist test-dist clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train the scaled-down GLM-4.5-Air in two processes and draw its chart"
	@echo "make test       linters, type checks and the default test-suite"
	@echo "make test-slow  the tests that the default suite leaves out"
	@echo "make test-versions  the optimizer's tests with the oldest supported DeepSpeed"
	@echo "make docs       the site, in build/docs; a warning is an error"
	@echo "make setup      only the virtual environment"
	@echo "make dist       the wheel and the sdist, in dist/"
	@echo "make test-dist  the demo from both, in a fresh environment without this folder"

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@echo "Setting up $(VENV) with $(CONSTRAINTS) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) --editable ".[recipes,dashboards,docs,test]"
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

# The source folder is the repository: README.md and CONTRIBUTING.md are pages, too.
docs: setup
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html -c docs . build/docs

test: lint docs
	@echo "Compiling DeepSpeed's ops that tests use, once (a few minutes) ..."
	@$(BIN)/python -m tests.build_ops 2> /dev/null
	$(BIN)/python -m pytest -m "not slow" --numprocesses $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

$(OLD_VENV)/.installed: $(VENV)/.installed $(OLD_DEEPSPEED)
	test -x $(OLD_BIN)/python || $(BIN)/python -m venv $(OLD_VENV)
	$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" > \
	  $$($(OLD_BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/first_environment.pth
	$(OLD_BIN)/python -m pip install --quiet --no-deps --requirement $(OLD_DEEPSPEED)
	@touch $@

test-versions: $(OLD_VENV)/.installed
	TORCH_EXTENSIONS_DIR=$(abspath $(OLD_VENV))/torch_extensions RANKS_AT_MOST=1 \
	  $(OLD_BIN)/python -m pytest $(OLD_TESTS) -m "not slow" $(VERSIONS_ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

dist: setup
	$(BIN)/python -m pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) --editable ".[release]"
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# As a user has it: no activated environment, ops compiled anew, output in the working directory. The sdist's turn needs
# no second download of the dependencies.
test-dist: dist
	set -e; away=$$(mktemp -d); trap 'rm -rf "$$away"' EXIT; \
	export PATH="$${PATH#$(BIN):}" TORCH_EXTENSIONS_DIR="$$away/ops"; \
	$(PYTHON) -m venv "$$away/venv"; \
	"$$away/venv/bin/pip" install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) "$$(echo $(abspath dist)/*.whl)[recipes]"; \
	cd "$$away"; \
	venv/bin/lightning-zero3 recipe glm45air --max_steps 20 --output from_wheel; \
	venv/bin/pip install --quiet --no-deps --force-reinstall $(abspath dist)/*.tar.gz; \
	venv/bin/lightning-zero3 recipe glm45air --max_steps 20 --output from_sdist; \
	ls from_wheel/version_0/chart.png from_sdist/version_0/chart.png

clean:
	rm -rf $(VENV) $(OLD_VENV) runs build dist .mypy_cache .ruff_cache .pytest_cache
