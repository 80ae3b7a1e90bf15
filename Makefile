# make demo and make test set everything up themselves; both work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What make test runs; each of the others has a target of its own.
FAST := not gpu and not slow and not faults and not disaggregation and not replicas and not v4

.PHONY: setup demo quick test lint slow-test fault-test soak v4-test pd-test router-test gpu-test gpu-visit bench launches learn-demo eval-tiny figures reference

# A folder with benchmarks/*.jsonl; see docs/results.md.
DATA ?= data

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "Installing SGLang 0.5.23 and torch: about 11 GB, three to seven minutes."
	@[ -t 1 ] || quiet=--quiet; $(BIN)/python -m pip install $$quiet --editable '.[test,train,plot,eval]'
	touch $@

# After every edit: no server, no training.
quick: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "$(FAST) and not heavy" -n 2 --dist loadfile tests/unit tests/launches

demo: setup
	$(BIN)/python -m eval.demo

# Two groups of tests at a time, by the servers they share (tests/engine/conftest.py orders them).
# A test that takes an hour hangs; none is judged by how long it takes.
test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(FAST)" -n 2 --dist loadgroup --no-loadscope-reorder --timeout 3600 --durations=30

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

slow-test: setup
	$(BIN)/python -m pytest -m slow

# Every long command, killed, interrupted, starved of disk, run twice, damaged.
fault-test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m faults tests/faults tests/engine

# Thirty minutes of mixed traffic, and as many with learning; HYPERDFLASH_SOAK_MINUTES changes that.
# Every run adds its report to build/soak.json.
soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m slow tests/engine/test_soak.py

# SGLang's own DeepSeek-V4 on a CPU: every way to serve a request, its golden, its controls.
v4-test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/engine/v4

# A prefill and a decode node over TCP; the system needs libibverbs (Debian: libibverbs1).
pd-test: setup
	$(BIN)/python -m pip install --quiet --editable '.[pd]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/engine/test_disaggregation.py

# Two servers behind SGLang's own router, one of them killed.
router-test: setup
	$(BIN)/python -m pip install --quiet --editable '.[router]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/engine/test_replicas.py

gpu-test: setup
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m pytest tests/unit/triton_ops/test_*_kernel*.py

# A visit to a GPU, half an hour in the order of its --plan: kernels first, 1M context last; one JSON.
gpu-visit: setup
	$(BIN)/python -m tests.gpu.visit

bench: setup
	$(BIN)/python -m tests.gpu.bench --out eval/results/kernels
	$(BIN)/python -m tests.gpu.bench_verify --out eval/results/kernels

# Launches, bytes and memory of every kind of round, counted without a GPU; seconds.
launches: setup
	$(BIN)/python -m tests.launches

# About an hour on two idle cores: an untrained drafter learns from what its server answers.
learn-demo: setup
	PYTHONPATH=. $(BIN)/python examples/tiny_deepseek_v4/learn_demo.py --out build/learn_demo

eval-tiny: setup
	$(BIN)/python examples/tiny_deepseek_v4/exchange_prompts.py held-out --out build/held_out
	$(BIN)/python -m eval run --suite tiny --data-dir $(DATA)/benchmarks --out build/eval-tiny

# The figures of README and docs, and README's table, from eval/results/.
figures: setup
	$(BIN)/python -m docs.figures.draw

# The pages of docs/reference/, from the code.
reference: setup
	$(BIN)/python -m docs.reference.generate
