# SPDX-License-Identifier: Apache-2.0
# `make serve` and `make test` set up what they need in .venv and run; nothing is installed twice.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

MODEL  ?= kimi-k3-tiny
ARGS   ?=
# With a limit in seconds, test-gpu and bench-gpu do what the run before has left; and where figures go.
LIMIT     ?=
BENCH_OUT ?= benchmarks/results/kda_h200.json
# Kernels beyond torch are installed for serving where there is a GPU to run them.
SERVE_EXTRAS ?= $(if $(shell command -v nvidia-smi),gpu)

# What is installed, by the extras it came with; either depends on the files that say what to install.
RUNTIME_STAMP := $(VENV)/.installed-runtime
TEST_STAMP    := $(VENV)/.installed-test
# An environment for tests can serve as well.
SERVE_STAMP   := $(if $(wildcard $(TEST_STAMP)),$(TEST_STAMP),$(RUNTIME_STAMP))

# torch's own threads: tests are many and small, and two threads on two cores cost more than they give.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.NOTPARALLEL:
.PHONY: help serve test check test-unit test-slow test-gpu bench-gpu format setup clean

help:
	@echo 'make serve      start the server with $(MODEL) (MODEL=..., ARGS="--port 8001 ...")'
	@echo 'make test       make check, then every test that needs neither a GPU nor minutes'
	@echo 'make check      format, lint, types, size budget, import arrows'
	@echo 'make test-slow  the long tests; make test-gpu: the tests of the kernels, on a machine with a GPU'
	@echo 'make bench-gpu  the figures of the kernels; with LIMIT=120 both go on where the last run stopped'
	@echo 'make format     rewrite the sources in the one format'

serve: $(SERVE_STAMP)
	$(BIN)/trtllm-serve $(MODEL) $(ARGS)

test: check test-unit

test-unit: $(TEST_STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -q -m 'not slow and not cuda' --ignore=tests/architecture $(ARGS)

test-slow: $(TEST_STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -q -m 'slow and not cuda' $(ARGS)

test-gpu: $(TEST_STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -q -m cuda --ignore=tests/unittest/_torch/modules/kda/ops $(ARGS)
	$(TEST_ENV) $(BIN)/python -m tests.gpu_receipt $(if $(LIMIT),--seconds $(LIMIT))

# Code 3 (make: Error 3): time is up, run it again to go on.
bench-gpu: $(TEST_STAMP)
	$(BIN)/python -m benchmarks.kda --all --out $(BENCH_OUT) $(if $(LIMIT),--seconds $(LIMIT))

check: $(TEST_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/size.py --check
	$(TEST_ENV) $(BIN)/python -m pytest -q tests/architecture
	$(BIN)/python -m tests.gpu_receipt --check
	$(BIN)/python -m benchmarks.kda --check --out $(BENCH_OUT)

format: $(TEST_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(TEST_STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else \
	  "Python 3.11 or 3.12 is needed, this is %d.%d: make PYTHON=python3.12 ..." % v)'
	$(PYTHON) -m venv $(VENV)

$(RUNTIME_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing what serving needs into $(VENV): about a minute, longer where torch comes with CUDA'
	$(PIP) --editable '.$(if $(SERVE_EXTRAS),[$(SERVE_EXTRAS)])'
	@touch $@

$(TEST_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing what tests need into $(VENV): about a minute, longer where torch comes with CUDA'
	$(PIP) --editable '.[test]'
	@touch $@

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
