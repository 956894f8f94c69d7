# `make demo` runs the main job on a real model graph; `make test` passes the tests. Both make the
# virtual environment they need. PYTHON= chooses the interpreter, PYTEST_ARGS= goes to pytest.

PYTHON ?= $(shell tools/find_python.sh)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-fast check clean

$(BIN)/python:
	@test -n "$(PYTHON)"
	@echo "Using $$($(PYTHON) --version) in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.test: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[test,tpu]'
	@touch $@

$(VENV)/.demo: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python tools/demo.py

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# What runs on every supported Python: no long compiles, no libtpu.
test-fast: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow and not tpu" $(PYTEST_ARGS)

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	tools/typecheck.sh $(BIN)/python

clean:
	rm -rf .venv .venv-* build *.egg-info .demo
