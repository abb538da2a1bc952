# make demo    two tenants train a model on this machine, from nothing, in minutes
# make run     the product on http://127.0.0.1:8000 until Ctrl-C
# make test    everything that CI runs; make check is its first, quick part
# make clean   stop what still runs and remove what was written; the virtual environment stays

PYTHON ?= python3.11
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
# Only errors are printed. Modules are compiled when they are first imported: most never are.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --no-compile -c constraints.txt

.PHONY: demo run test check clean venv machine constraints

demo: $(VENV)/.run
	@$(BIN)/python -m infra.demo

run: $(VENV)/.run
	@$(BIN)/python manage.py up --port $(PORT)

test: check machine
	$(BIN)/python -m pytest

check: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python manage.py makemigrations --check --dry-run

venv: $(VENV)/.test

clean:
	@python=$(BIN)/python; [ -x $$python ] || python=$(PYTHON); $$python -m infra.embedded.sweep
	rm -rf var build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# ---------------------------------------------------------------- set-up, each step once

$(VENV)/.made:
	@for python in $(PYTHON) python3 python; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; \
	  then echo "making $(VENV) with $$python"; $$python -m venv $(VENV) && touch $@; exit; fi; \
	done; \
	echo "Python 3.11 with its venv module is needed and was not found; name it: make PYTHON=/path/to/python3.11" >&2; \
	exit 1

# First and alone: the largest wheel, and the one that seldom changes.
$(VENV)/.torch: $(VENV)/.made
	@echo "installing torch"
	@$(PIP) torch==2.13.0
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "installing jigsaw"
	@$(PIP) -e '.[workers,models]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	@echo "installing the tests' and developers' tools"
	@$(PIP) -e '.[workers,models,environments,test,dev]'
	@touch $@

# What tests use of the machine, installed where that is possible. Those that need a browser look for one in
# $$CHROME, then in the PATH, and are skipped without it; those of the sandbox try bubblewrap where it is there.
machine:
	@if command -v bwrap >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing bubblewrap"; \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap; } >/dev/null \
	    || echo "bubblewrap could not be installed: the sandbox is tested without it" >&2; \
	fi
	@if [ -n "$$CHROME" ] || command -v chromium chromium-browser google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing chromium"; \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } >/dev/null \
	    || echo "chromium could not be installed: browser tests are skipped" >&2; \
	else echo "no browser found: set CHROME or install chromium; browser tests are skipped" >&2; fi

# Pin what is installed now, for a fresh machine: without this project, addresses and local versions (torch's +cpu).
constraints: $(VENV)/.test
	$(BIN)/python -m pip freeze --exclude-editable | grep -v ' @ ' | sed 's/+.*//' > constraints.txt
