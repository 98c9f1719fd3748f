# Everything here works on a fresh clone; the lab's targets need root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAB := $(PYTHON) tests/lab/lab.py
SHELL_FILES := $(wildcard app/utils/vec_inf_multinode/scripts/*.sh tests/lab/templates/*.sh) .ci/run

.PHONY: help demo test test-fast test-faults test-vllm lint format lab-up lab-down lab-status clean

help:
	@echo "make demo       launch a real model over two nodes of the one-machine cluster"
	@echo "                (DEMO_ARGS=--tensor for TP=2 across the nodes)"
	@echo "make test       every test; brings the one-machine cluster up"
	@echo "make test-faults  every fault, with real vLLM where it matters (about 20 minutes)"
	@echo "make test-vllm VERSION=0.31.0  another vLLM, end to end (about 5 minutes)"
	@echo "make test-fast  the tests that need no cluster"
	@echo "make lint       black, isort, flake8, shellcheck"
	@echo "make lab-up | lab-down | lab-status    the one-machine cluster (LAB_ARGS='--nodes 4')"

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[dev]'
	touch $@

# shellcheck is a test's subject, not a Python package
shellcheck:
	@command -v shellcheck >/dev/null || { apt-get update -qq && apt-get install -y -qq shellcheck; }

demo:
	$(PYTHON) tests/lab/demo.py $(DEMO_ARGS)

test: $(VENV)/.installed shellcheck
	$(BIN)/pytest -m 'not slow'

test-fast: $(VENV)/.installed shellcheck
	$(BIN)/pytest -m 'not lab and not removals'

test-faults: $(VENV)/.installed
	$(BIN)/pytest -rA tests/test_faults_standin.py tests/test_faults_vllm.py

# one row of bench/results/vllm-versions.json; the environment it builds (3.5 GB, 8 GB
# where only PyPI's CUDA build of torch is to be had) is removed again
test-vllm: $(VENV)/.installed
	VLLM_VERSION=$(VERSION) $(BIN)/pytest -s tests/test_vllm_matrix.py

lint: $(VENV)/.installed shellcheck
	$(BIN)/black --check -q app tests || $(BIN)/black --check app tests
	$(BIN)/isort --check -q app tests
	$(BIN)/flake8 app tests
	shellcheck -x $(SHELL_FILES)

format: $(VENV)/.installed
	$(BIN)/isort -q app tests
	$(BIN)/black -q app tests

lab-up:
	$(LAB) up $(LAB_ARGS)

lab-down:
	$(LAB) down

lab-status:
	$(LAB) status

clean:
	rm -rf $(VENV) dist build .pytest_cache
