# The two commands of the README. Each step is skipped when it is done already.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: chat test lint clean
.DELETE_ON_ERROR:

chat: $(VENV)/.installed
	@$(BIN)/pagedserve chat

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-test: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@ $(VENV)/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "error: PagedServe needs Python 3.10 or newer (PYTHON=... make chooses another one)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "error: $(PYTHON) cannot make virtual environments (on Debian: apt install python3-venv)"; exit 1; }

clean:
	rm -rf $(VENV) build *.egg-info
