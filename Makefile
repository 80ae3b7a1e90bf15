# make demo and make test set everything up themselves; both work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint slow-test gpu-test bench

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test,train,plot]'
	touch $@

demo: setup
	$(BIN)/hyperdflash demo

test: setup lint
	$(BIN)/python -m pytest -m "not gpu and not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

slow-test: setup
	$(BIN)/python -m pytest -m slow

gpu-test: setup
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m pytest tests/unit/test_gate_kernels.py

bench: setup
	$(BIN)/python -m triton_ops.bench --out eval/results/kernels
