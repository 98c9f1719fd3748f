# Everything here works on a fresh clone; the lab's targets need root.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAB := $(PYTHON) tests/lab/lab.py
SHELL_FILES := $(wildcard app/utils/vec_inf_multinode/scripts/*.sh tests/lab/templates/*.sh) .ci/run

.PHONY: tools help bench demo screens test test-fast test-faults test-vllm lint format lab-up lab-down lab-status clean

help:
	@echo "make demo       launch a real model over two nodes of the one-machine cluster"
	@echo "                (DEMO_ARGS=--tensor for TP=2 across the nodes)"
	@echo "make screens    take the pictures in docs/ anew, on the cluster that is up"
	@echo "make test       every test; brings the one-machine cluster up"
	@echo "make test-faults  every fault, with real vLLM where it matters (about 40 minutes)"
	@echo "make test-vllm VERSION=0.31.0  another vLLM, end to end (about 5 minutes)"
	@echo "make test-fast  the tests that need no cluster"
	@echo "make bench      what the launcher costs, side by side (BENCH_ARGS='hub start')"
	@echo "make lint       black, isort, flake8, shellcheck"
	@echo "make lab-up | lab-down | lab-status    the one-machine cluster (LAB_ARGS='--nodes 4')"

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -e '.[dev]'
	touch $@

# what the tests run besides Python packages
tools:
	@{ command -v shellcheck && command -v strace; } >/dev/null || { apt-get update -qq && apt-get install -y -qq shellcheck strace; }

demo:
	$(PYTHON) tests/lab/demo.py $(DEMO_ARGS)

screens: $(VENV)/.installed
	$(BIN)/python tests/lab/screens.py

# The removals need processors, the cluster mostly patience: both at once.
test: $(VENV)/.installed tools
	@nice -n 19 $(BIN)/pytest -q -m 'removals and not slow' >$(VENV)/removals.log 2>&1 & removals=$$!; \
	trap 'kill $$removals; exit 130' INT TERM; \
	$(BIN)/pytest -m 'not slow and not removals'; status=$$?; \
	wait $$removals || status=1; cat $(VENV)/removals.log; exit $$status

test-fast: $(VENV)/.installed tools
	$(BIN)/pytest -m 'not lab and not removals'

test-faults: $(VENV)/.installed
	$(BIN)/pytest -rA tests/test_faults_*.py tests/test_diagnose_lab.py tests/test_run_lab.py

# one row of bench/results/vllm-versions.json; the environment it builds (3.5 GB, 8 GB
# where only PyPI's CUDA build of torch is to be had) is removed again
test-vllm: $(VENV)/.installed
	VLLM_VERSION=$(VERSION) $(BIN)/pytest -s tests/test_vllm_matrix.py

lint: $(VENV)/.installed tools
	$(BIN)/black --check -q app bench tests || $(BIN)/black --check app bench tests
	$(BIN)/isort --check -q app bench tests
	$(BIN)/flake8 app bench tests
	shellcheck -x $(SHELL_FILES)

bench: $(VENV)/.installed tools
	$(BIN)/pip install -q -e '.[bench]'
	$(BIN)/python bench/bench.py $(BENCH_ARGS)

format: $(VENV)/.installed
	$(BIN)/isort -q app bench tests
	$(BIN)/black -q app bench tests

lab-up:
	$(LAB) up $(LAB_ARGS)

lab-down:
	$(LAB) down

lab-status:
	$(LAB) status

clean:
	rm -rf $(VENV) dist build .pytest_cache
