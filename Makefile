# `make` lists the targets. Everything runs in a virtual environment of its own, made on first use.
#
#   make test ARGS="-k policy"                                   arguments for the command behind a target
#   make setup PYTHON=python3.13 VENV=.venv313 TORCH=            the newest JAX, without PyTorch and without pins

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
# PyTorch comes in builds of very different size, and pip must not choose another release than the one that is tested.
TORCH ?= torch==$(shell sed -n 's/^torch==//p' constraints.txt)
ARGS ?=

COMMA := ,
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
EXTRAS := gpu-compile,tpu-compile,test,dev,docs$(if $(TORCH),$(COMMA)torch)
PINS := $(if $(TORCH),-c constraints.txt,)
# Two workers on two cores: more threads in each only take turns. A file stays in one worker, with what its tests share;
# the short ones, docstrings, stay last, so that both workers end together.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.PHONY: help
help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

.PHONY: setup
setup: $(STAMP)  ## make .venv and install everything that development needs

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip
	$(if $(TORCH),$(PIP) install -q $(PINS) '$(TORCH)')
	$(PIP) install -q $(PINS) -e '.[$(EXTRAS)]'
	@touch $@

.PHONY: demo
demo: $(STAMP)  ## plan a model that does not fit; train a decoder in every mode and framework, and compare
	$(BIN)/remat-jax demo $(ARGS)

.PHONY: test
test: $(STAMP)  ## run all tests
	PYTHONDONTWRITEBYTECODE= $(ONE_THREAD) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: coverage
coverage: $(STAMP)  ## run all tests, also in the processes that they start, and print how much of each package ran
	rm -rf build/coverage && mkdir -p build/coverage
	$(ONE_THREAD) $(BIN)/python -m coverage run -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS) || failed=1; \
	$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage json -q; \
	$(BIN)/python -m benchmarks.coverage build/coverage/all.json; test -z "$${failed:-}"

.PHONY: test-browser
test-browser: $(STAMP)  ## run the tests that open pages in an installed Chromium
	$(BIN)/python -m pytest -m browser tests $(ARGS)

.PHONY: test-versions
test-versions: $(STAMP)  ## run the tests that need no PyTorch on the oldest, a middle and the newest JAX
	$(BIN)/python -m tests.versions $(ARGS)

NEXT := jax_remat3+jax_custom_jvp3+jax_custom_vjp3
.PHONY: test-newest
test-newest: $(STAMP)  ## run a representative part of them with the newest JAX, as it is and with the flags of the next
	$(BIN)/python -m tests.versions --if-there --jax newest --flags none --flags $(NEXT) -m versions $(ARGS)

PAIRS := .venv-pairs
.PHONY: test-pairs
test-pairs: $(PAIRS)/.installed  ## compare 67 pairs of models, Flax beside PyTorch, most of transformers 4.56.2, and write their note
	JAX_PLATFORMS=cpu $(ONE_THREAD) $(PAIRS)/bin/python -m parity_tests.pairs $(ARGS)

$(PAIRS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PAIRS)
	$(PAIRS)/bin/python -m pip install -q --upgrade pip
	sed '/^\(transformers\|huggingface.hub\|tokenizers\|diffusers\)==/Id' constraints.txt > $(PAIRS)/constraints.txt
	$(PAIRS)/bin/python -m pip install -q -c $(PAIRS)/constraints.txt '$(TORCH)' transformers==4.56.2 -e .
	@touch $@

.PHONY: fuzz
fuzz: $(STAMP)  ## try 2,000 random programs, 10,000 malformed texts and files
	$(BIN)/python -m tests.fault $(or $(ARGS),--programs 2000 --texts 10000 --files 10000)

.PHONY: lint
lint: $(STAMP)  ## check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: $(STAMP)  ## put the code into the common format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

.PHONY: bench
bench: $(STAMP)  ## measure on this machine's processor
	$(BIN)/python -m benchmarks $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m benchmarks.predict_memory)
	$(if $(ARGS),,$(BIN)/python -m benchmarks.plan_cpu)
	$(if $(ARGS),,$(BIN)/python -m benchmarks.steps_cpu)
	$(if $(ARGS),,$(BIN)/python -m benchmarks.plan)
	$(if $(ARGS),,$(BIN)/python -m benchmarks.true_shapes)
	$(if $(ARGS),,$(BIN)/python -m benchmarks.published)

.PHONY: figures
figures: $(STAMP)  ## write the figures of the pages by the commands that print them; all of them take hours
	$(BIN)/python -m benchmarks.figures $(ARGS)

.PHONY: bench-gpu
bench-gpu: $(STAMP)  ## measure sixteen steps on this machine's GPU, in nine minutes
	$(BIN)/python -m benchmarks.gpu $(ARGS)

.PHONY: wheel
wheel: $(STAMP)  ## build the wheel into dist; its version is the tag's
	rm -rf dist
	$(PIP) wheel -q --no-deps --wheel-dir dist .

.PHONY: smoke
smoke: wheel  ## install the wheel by itself into an empty environment and use it
	$(BIN)/python -m tests.smoke dist/*.whl

.PHONY: docs
docs: $(STAMP)  ## build the documentation, strictly, into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

.PHONY: lock
lock: $(STAMP)  ## write the versions that are installed into constraints.txt
	$(PIP) freeze --exclude-editable | sed 's/+cpu$$//' | sort -f > $(VENV)/freeze.txt
	{ sed -n '/^#/p' constraints.txt; cat $(VENV)/freeze.txt; } > $(VENV)/constraints.txt
	cp $(VENV)/constraints.txt constraints.txt

.PHONY: clean
clean:  ## remove what was built, but not .venv and .venvs
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0r rm -rf
