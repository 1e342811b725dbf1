# Everything from a fresh machine with python3 (3.10 or newer) and make; nothing is installed outside .venv.
PYTHON ?= python3
VENV   ?= .venv
RESULTS ?= benchmarks/results/h200
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help ladder test lint types unit test-gpu test-gpu-big test-gpu-rest sanitize measure readme clean

help:
	@echo "make ladder    set up and climb the ladder on a real model's q, k, v"
	@echo "make test      set up and run lint, types and the whole suite"
	@echo "make test-gpu  the operators' suite on this machine's GPU"
	@echo "make sanitize  its kernels under compute-sanitizer"
	@echo "make measure   every benchmark of this machine's GPU, into RESULTS=$(RESULTS)"
	@echo "make readme    the tables of README and docs, anew from benchmarks/results"
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
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

# The tests that fill the card's memory run by themselves, beside the others. What runs on the CPU, and compiling for cards that are not
# there, is CI's part. Random problems compile most and take longest: they start first, and no process is given more than one test ahead
# of the one it runs. In shares of many tests one process had all of those to do, and the others waited.
test-gpu: $(VENV)/.dev
	$(MAKE) --jobs 2 --output-sync --keep-going test-gpu-big test-gpu-rest

test-gpu-big: $(VENV)/.dev
	$(BIN)/python -m pytest -m big tests/gpu

test-gpu-rest: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses auto --maxschedchunk 1 -m "not big" -k "not cpu" \
	    --deselect tests/attention/test_hopper_compile.py --deselect tests/attention/test_hopper_schedule.py \
	    --deselect tests/attention/test_triton_compile.py --deselect tests/softmax/test_plan.py \
	    tests/gpu/test_random_gpu.py tests/attention/test_random.py tests/gpu tests/attention tests/softmax \
	    tests/ladder/test_kernels.py tests/ladder/test_backward.py tests/lab/test_card.py

sanitize: $(VENV)/.dev
	$(BIN)/python benchmarks/sanitize.py

# Each replaces its file only when it ends well; peers that are not installed are left out and named.
measure: $(VENV)/.dev
	$(BIN)/python benchmarks/attention_overhead.py --json $(RESULTS)/attention_overhead.json
	$(BIN)/python benchmarks/attention_forward.py --json $(RESULTS)/attention_forward.json
	$(BIN)/python benchmarks/attention_triton.py --json $(RESULTS)/attention_triton.json
	$(BIN)/python benchmarks/softmax.py --json $(RESULTS)/softmax.json
	$(BIN)/python benchmarks/ladder_gpu.py --json $(RESULTS)/ladder.json
	$(BIN)/python -m onchip lab run --counters --json $(RESULTS)/lab.json

readme: $(VENV)/.dev
	$(BIN)/python benchmarks/docs.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
