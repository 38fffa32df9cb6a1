# `make demo` and `make test` set up all they need in $(VENV) the first time.
#
#   PYTHON  the interpreter that the virtual environment is made with, 3.10 to 3.13
#   VENV    where it goes. Empty (`make test VENV=`): run $(PYTHON) as it is and install nothing
#
# `make test-vllm` sets up another one in $(VENV_VLLM), with Python 3.12, which it looks for unless $(PYTHON_VLLM) says.
PYTHON ?= python3
VENV ?= .venv
PYTHON_VLLM ?=
VENV_VLLM ?= .venv-vllm

RUN := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
READY := $(if $(VENV),$(VENV)/.ready)

# Where pytest-xdist is installed, tests are spread over all cores; tests/conftest.py says how many processes that are.
SPREAD := from importlib.util import find_spec; print("-n auto --dist loadgroup" if find_spec("xdist") else "")

.PHONY: help demo test test-pins test-vllm lint fuzz gpu-check clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo       decode the tokens of a DeepSeek-V3.2 attention layer from an FP8 cache'
	@echo 'make test       all tests that need no GPU; on an SM90 GPU also those that do'
	@echo 'make test-pins  tests of compiled kernels with the lowest and the highest versions of the dependencies'
	@echo 'make test-vllm  tests that need vLLM, or what comes with it, in an environment of their own (8 GB)'
	@echo 'make lint       ruff and mypy'
	@echo 'make fuzz       random calls of all operators, from many threads on an SM90 GPU; writes build/fuzz.json'
	@echo 'make gpu-check  on an SM90 GPU: tests/gpu, compute-sanitizer, benchmark; writes results/*.jsonl'
	@echo 'make clean      remove the virtual environment and every cache'

demo: $(READY)
	$(RUN) scripts/demo.py

test: $(READY)
	$(RUN) -m pytest $$($(RUN) -c '$(SPREAD)')

# Makes environments of its own in build/pins.
test-pins:
	$(PYTHON) scripts/try_pins.py

test-vllm: $(VENV_VLLM)/.ready
	$(VENV_VLLM)/bin/python -m pytest tests/cpu/test_vllm_calls.py tests/cpu/test_vllm_contracts.py tests/cpu/test_vllm_engine.py tests/cpu/test_vllm_gqa.py tests/cpu/test_vllm_mla.py tests/cpu/test_vllm_v4.py tests/cpu/test_continuous_batching.py

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

fuzz: $(READY)
	$(RUN) scripts/fuzz.py

gpu-check: $(READY)
	$(RUN) scripts/gpu_check.py

clean:
	rm -rf .venv .venv-vllm build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find cute_kernels fp8_mla bench scripts tests -name __pycache__ -prune -exec rm -rf {} +

ifeq ($(VENV),)
# The project itself is not installed then.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
$(READY): pyproject.toml scripts/bootstrap.sh
	bash scripts/bootstrap.sh $(VENV) $(PYTHON)
	@touch $@
endif

$(VENV_VLLM)/.ready: pyproject.toml scripts/bootstrap_vllm.sh
	bash scripts/bootstrap_vllm.sh $(VENV_VLLM) $(PYTHON_VLLM)
	@touch $@
