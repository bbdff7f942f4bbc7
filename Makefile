# Two commands for a bare machine with Python 3.11-3.13 and pip: `make demo` and `make test`.
PYTHON ?= python3
# For `make gpu-test`: a Python with PyTorch for CUDA, Triton and pytest. The one of $(VENV) has PyTorch for CPU.
GPU_PYTHON ?= $(PYTHON)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Many small GEMMs, and a process for each core: one thread in each, also in processes that tests start themselves,
# and where a test asks for more, threads that sleep while they wait instead of spinning.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest
# Each process runs its share of the tests in order; one that is done takes tests from the end of another's share.
PARALLEL := -n auto --maxprocesses 4 --dist worksteal --durations=8
# Rooms and files that need no model of more than a few layers, and little time.
QUICK := tests/test_layout.py tests/test_surface.py tests/test_readme.py tests/nouns tests/text tests/attention tests/gpu \
	tests/verify tests/policy tests/engine/test_endings.py tests/models/test_vocabulary_sizes.py \
	$(addprefix tests/models/formats/test_, resolve.py hub.py hf_loading.py gguf_loading.py) \
	$(addprefix tests/drafters/, retrieval growing/test_lattice.py growing/test_static_tree.py) \
	tests/drafters/device/test_repeats.py tests/drafters/heads/test_weight_codec.py \
	$(addprefix tests/train/test_, loops.py optimiser.py requests.py training_data.py) \
	tests/bench/test_gpu_figures.py tests/commands/test_cli_wrap.py tests/commands/test_cli_startup.py

.PHONY: demo test check kernels replicas browser gpu-test style unit real clean

demo: $(VENV)/.installed
	$(BIN)/slipstream demo

test: style
	$(PYTEST) $(PARALLEL) -m "not replicas"

# Under 90 seconds on two cores: style, types, and the tests that need no model, statistics or emulated rounds.
check: style
	$(PYTEST) -n 2 --dist worksteal -m "not real_model and not slow and not kernels" $(QUICK)

# The Triton kernels in Triton's interpreter, on a machine without a GPU. PyTorch for CPU comes without Triton (190 MB).
kernels: $(VENV)/.dev
	$(BIN)/python -c "import triton" 2>/dev/null || $(PIP) install -q triton==3.6.0
	$(PYTEST) $(PARALLEL) -m "kernels and not gpu"

# Replicas of the server on a real Ray: nothing else runs meanwhile.
replicas: $(VENV)/.dev
	$(PYTEST) -m replicas tests/server/ray

# The playground in Chromium. Where that is missing, `make test` skips these tests, and this target fails.
browser: $(VENV)/.dev
	@command -v chromium || command -v chromium-browser || { echo "chromium is not installed" >&2; exit 1; }
	@$(BIN)/python -c "import playwright"
	$(PYTEST) tests/server/routes/test_playground.py

# What needs a GPU: captured graphs, rounds, exact mode, the loop, reports, every kernel. In one process: one GPU.
gpu-test:
	$(TEST_ENV) $(GPU_PYTHON) -m pytest -m "gpu or kernels" --durations=8 -ra

style: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(PYTEST) $(PARALLEL) -m "not real_model and not replicas"

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
