# Everything that a developer or CI runs. Each target sets up .venv by itself; all it needs is make and a Python of
# 3.11 or newer with venv. Another interpreter: make test PYTHON=/path/to/python3.13

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Tests wait more than they compute. Four at once is what the 100 connections of an ordinary PostgreSQL carry.
WORKERS ?= 4
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)

.PHONY: help install test check format demo bench clean

help:
	@echo "make demo    see the event bus work on real data, in about a minute"
	@echo "make test    everything that CI runs: make check, then the tests (ARGS='-k topics' are pytest's arguments,"
	@echo "             WORKERS=4 how many processes run them; with 0 they run one after the other)"
	@echo "make check   formatting, lint, types, import layers"
	@echo "make format  let ruff format the code and fix what it can"
	@echo "make bench   measure this machine"
	@echo "make clean   remove the virtual environment and every cache"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; say where it is: make PYTHON=/path/to/python" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; "$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; }
	@echo "installing eventbus and its tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# Both halves run, so that one failure does not hide another; pytest comes last, so that its summary does too.
test: $(INSTALLED)
	@failed=; \
	$(MAKE) --no-print-directory check || failed=1; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS) || failed=1; \
	test -z "$$failed"

check: $(INSTALLED)
	@failed=; \
	for tool in "ruff format --check" "ruff check" "mypy" "lint-imports --no-logo"; do \
		echo "== $$tool"; $(BIN)/$$tool || failed=1; \
	done; \
	test -z "$$failed"

format: $(INSTALLED)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

demo: $(INSTALLED)
	@$(BIN)/eventbus demo $(ARGS)

bench: $(INSTALLED)
	@$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
