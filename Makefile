# Two commands for a bare machine with Python 3.11-3.13 and pip: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Many small matrix products, and a process for each core: one thread in each, also in what the tests start themselves,
# and where a test asks for more, threads that sleep while they wait instead of spinning.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest
# Each process has its share of the tests, in order; who is done first takes over from the end of what another has left.
PARALLEL := -n auto --maxprocesses 4 --dist worksteal --durations=8

.PHONY: demo test check style unit real clean

demo: $(VENV)/.installed
	$(BIN)/slipstream demo

test: style
	$(PYTEST) $(PARALLEL)

# Under a minute: style, types, and the tests that need neither a model nor statistics.
check: style
	$(PYTEST) tests/test_layout.py tests/test_options.py tests/test_tree.py tests/test_endings.py

style: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(PYTEST) $(PARALLEL) -m "not real_model"

real: $(VENV)/.dev
	$(PYTEST) $(PARALLEL) -m real_model

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV): PyTorch for CPU (about 200 MB) and what slipstream needs (about 120 MB more)."
	@echo "The first run also downloads the default model, SmolLM2-135M-Instruct (93 MB), into your cache."
	$(PIP) install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) install -q -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
