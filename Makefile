# What a person types, and what CI runs. Every target does its own set-up; a second run starts at once.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-newest test-compile test-gpu bench clean

# .venv holds the oldest supported JAX, .venv-newest the newest.
JAX_OLDEST := jax==0.11.2
JAX_NEWEST := jax>=0.12,<0.13
PYTHON_IN_VENV := .venv/bin/python

# A core for each file; more than four would compile the same steps once more. Files start in the order of tests/conftest.py,
# the long ones first. Small NumPy products wait for each other's threads where cores are few, and the oracles are made of
# them. A worker that crashes ends the run, which fails: with another in its place the run would wait for ever.
WORKERS := -n auto --maxprocesses 4 --max-worker-restart 0
PYTEST := -m pytest $(WORKERS) --dist loadfile --no-loadscope-reorder
COMPILE := -m pytest -q $(WORKERS) --dist load -m compile tests/compile
export OPENBLAS_NUM_THREADS := 1
# Bytecode is kept whatever the environment says: each worker and each command line of a test imports the same modules.
unexport PYTHONDONTWRITEBYTECODE

# Interpreted Pallas kernels take minutes. On the newest JAX some tests of each say that it runs there, and all kernels are
# compiled for a GPU.
INTERPRETED := $(addprefix tests/kernels/test_,gated_delta_mosaic.py gdn_mixer_prefill.py paged_attention_mosaic.py \
    paged_attention_mosaic_prefill.py)
INTERPRETED_ON_NEWEST := $(addprefix tests/kernels/test_,\
    gated_delta_mosaic.py::test_every_packing_equals_the_float64_model_and_touches_nothing_else \
    gdn_mixer_prefill.py::TestMixer paged_attention_mosaic.py::test_every_dtype_and_width_equals_the_reference \
    paged_attention_mosaic_prefill.py::test_every_dtype_and_width_equals_the_reference)

# What can differ between versions of JAX: the kernels, whole models against recorded values, gradients, the refusal of
# wrong shapes, and an engine that prefills, decodes and hits what it decoded. The rest reasons about the same steps, or
# about none.
ON_NEWEST := $(filter-out $(INTERPRETED),$(wildcard tests/kernels/test_*.py)) $(INTERPRETED_ON_NEWEST) \
    tests/test_golden_conformance.py tests/model/test_training.py tests/test_strictness.py \
    "tests/serving/test_engine_laws_tokens.py::test_the_next_turn_hits_into_the_generated_text[all-30]"

# What runs on a device; the rest of serving reasons about the host.
ON_GPU := tests/kernels tests/model tests/test_golden_conformance.py tests/serving/test_verify.py \
    tests/serving/test_mosaic_engine.py tests/serving/test_async_scheduling.py $(wildcard tests/serving/test_*_laws_*.py)

DEMO_MODEL := pico
BENCHMARKS = $(sort $(wildcard benchmarks/*_cpu.py benchmarks/*/*_cpu.py))

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

setup:  ## make .venv with everything that development needs
	@scripts/setup.sh .venv dev "$(JAX_OLDEST)"

demo:  ## watch the small trained model write, chat and calculate; installs only what running needs
	@scripts/setup.sh .venv "" "$(JAX_OLDEST)"
	.venv/bin/python examples/demo.py $(DEMO_MODEL)

check: setup  ## lint, format, types, import directions
	$(PYTHON_IN_VENV) -m ruff check
	$(PYTHON_IN_VENV) -m ruff format --check
	rm -rf build
	$(PYTHON_IN_VENV) -m pip install --quiet --no-deps --no-build-isolation --target build/typecheck .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PYTHON_IN_VENV) -m pyright
	$(PYTHON_IN_VENV) -m pytest -q tests/test_architecture.py

test: setup  ## the whole suite for the CPU
	$(PYTHON_IN_VENV) $(PYTEST)

test-newest:  ## kernels, compiled ones too, golden values and one engine on the newest JAX
	@scripts/setup.sh .venv-newest dev,compile "$(JAX_NEWEST)"
	.venv-newest/bin/python $(COMPILE)
	.venv-newest/bin/python $(PYTEST) $(ON_NEWEST)

test-compile:  ## Pallas kernels compiled for an H200, without one: registers, spills, copies of a pool
	@scripts/setup.sh .venv-compile dev,compile "$(JAX_OLDEST)"
	.venv-compile/bin/python $(COMPILE)

test-gpu:  ## kernels, models and the engine's laws, on an NVIDIA GPU
	@nvidia-smi >/dev/null 2>&1 || { echo "make test-gpu needs an NVIDIA GPU: nvidia-smi does not run here" >&2; exit 1; }
	@scripts/setup.sh .venv-gpu dev,gpu "$(JAX_OLDEST)"
	JAX_PLATFORMS=cuda,cpu .venv-gpu/bin/python -m pytest -m "not compile" $(ON_GPU)

bench: setup  ## run the benchmarks that need no GPU
	@test -n "$(BENCHMARKS)" || { echo "no benchmark for the CPU under benchmarks/" >&2; exit 1; }
	@set -e; for module in $(subst /,.,$(basename $(BENCHMARKS))); do echo "== $$module"; $(PYTHON_IN_VENV) -m "$$module"; done

clean:  ## remove the environments and everything built
	rm -rf .venv .venv-newest .venv-compile .venv-gpu build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .cache
