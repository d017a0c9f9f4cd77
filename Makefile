# The environment lives in .venv, at the versions of constraints.txt. Every target makes it first if it is missing,
# and installs again when pyproject.toml or constraints.txt has changed. PYTHON only matters when .venv is made.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable
MINIMUM := 3, 11
VERSION_OK := import sys; sys.exit(sys.version_info < ($(MINIMUM)))

.DEFAULT_GOAL := help
.PHONY: help demo test check clean

help:
	@echo "make demo    train and compare the small models of 'blocktrain demo'; ARGS='--budget tiny' and so on"
	@echo "make test    run all tests, the slow ones too; ARGS='tests/data' and so on"
	@echo "make check   check format, lint and types"
	@echo "make clean   remove .venv, caches and build outputs; results stay"
	@echo "PYTHON=...   the Python, 3.11 or newer, that .venv is made with (now $(PYTHON))"

demo: $(VENV)/installed-plot
	$(BIN)/blocktrain demo $(ARGS)

test: $(VENV)/installed-dev-plot
	$(BIN)/python -m pytest -m "" $(ARGS)

check: $(VENV)/installed-dev-plot
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy lightning_blocktrain examples benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip comes last into a new environment, so that one whose making was interrupted is made again.
$(BIN)/pip:
	@$(PYTHON) -c "$(VERSION_OK)" || { \
	  echo "PYTHON must be Python 3.11 or newer; got PYTHON=$(PYTHON) ($$($(PYTHON) --version 2>&1));" \
	    "run make PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras: what demo needs is a part of what test and check need.
$(VENV)/installed-plot: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[plot]'
	@touch $@

$(VENV)/installed-dev-plot: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[dev,plot]'
	@touch $@ $(VENV)/installed-plot
