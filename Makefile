# Everything from a fresh machine with python3 (3.10 or newer) and make; nothing is installed outside .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help ladder test lint types unit test-gpu clean

help:
	@echo "make ladder    set up and climb the ladder on a real model's q, k, v"
	@echo "make test      set up and run lint, types and the whole suite"
	@echo "make test-gpu  the operators' suite on this machine's GPU"
	@echo "make clean     remove $(VENV) and caches"

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "onchip needs Python 3.10 or newer, this is %d.%d" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --editable '.[dev]'
	@touch $@

ladder: $(VENV)/.base
	$(BIN)/onchip ladder --inputs examples/data/minilm_qkv.npz

test: lint types unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses auto

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses auto tests/attention tests/softmax tests/gpu

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
