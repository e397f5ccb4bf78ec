"""Keys, options and commands that earlier versions had: each with one sentence that says what to do instead."""

# section.key of a job, or section.key=value where only that value is gone.
KEYS: dict[str, str] = {
    "generation.no_repeat_ngram_size": "Set it in the model's generation_config.json, or use repetition_penalty.",
    "questions.file": "Set questions.ask to the file.",
    "cache.approximation": "Set cache.kind = 'streaming-llm'.",
    "cache.sinks": "Leave it out; cache.kind = 'streaming-llm' keeps the first 4 tokens.",
    "model.offline": "Leave it out; HF_HUB_OFFLINE=1 or 0 in the environment decides.",
    "model.revision": "Download it (hf download ID --revision REVISION --local-dir FOLDER), and name the folder.",
    "report.metrics": "Leave it out; kvr status --json says the same of a running job.",
    "report.trace_mib": "Leave it out; the traces of a run take at most 256 MiB.",
    "compress.beta": "Leave it out; pyramidkv and headkv use the values of their papers (20 and 1.2).",
    "compress.floor": "Leave it out; ada-snapkv guarantees every head 0.2 of the budget, as kvpress does.",
    "compress.kernel": "Leave it out; scores are pooled over 5 neighbouring tokens, as in kvpress.",
    "compress.sinks": "Leave it out; streaming-llm keeps the first 4 tokens, as in its paper.",
    "parallel.partition=ratio": 'Use "equal_time" (the default), "even", or a "table" of kvr search.',
    "parallel.ratios": "Leave it out; slices take equal time, or those of a table that kvr search measured.",
    "parallel.table_force": "Leave it out; create a table for this model and machine with kvr search.",
    "model.kernels=compiled": "Leave it out; the default uses the fastest kernels measured on this machine.",
    "questions.reuse=auto": "Leave it out to load what is stored, or set 'never' to prefill the documents again.",
    "parallel.transport=gloo": 'Use "mpi" between CPUs, which "auto" chooses.',
    "parallel.compile": "Leave it out; a larger parallel.chunk_tokens saves launches and reads of weights.",
    "decode.cuda_graphs": "Leave it out; steps run kernel by kernel.",
    "output.kv_compression": "Leave it out; keys and values are stored as the model made them.",
    "output.kv_dtype": "Leave it out; keys and values are stored in the model's data type.",
    "parallel.ranks_per_stage": "Use parallel.tensor_parallel.",
    "model.stream_weights": "Leave it out; a model larger than memory is split over ranks by parallel.tensor_parallel.",
}

# A command, or a command and its option: "COMMAND --option".
COMMANDS: dict[str, str] = {
    "profile-heads": "Run kvr search JOB.toml --heads heads.json.",
    "doctor --ranks-per-stage": "Use --tensor-parallel.",
    "search --check": "in a clone of the repository, run `python -m benchmarks slices`.",
    "report --trace-json": "Open the files in RUN/trace at ui.perfetto.dev.",
    "import": "Copy the run's folder; kvr ask and documents.reuse read it where it is.",
    "bench": "in a clone of the repository, run `python -m benchmarks first-token`, `corpus` or `fairkv`.",
    "simulate": "use `kvr plan --tokens 64k --model MODEL --hardware h200 --ranks 8`; in a clone of the repository, "
    "`python -m benchmarks forecast`, `paper` and `fairkv-placement` do the rest.",
    "run --transport": "Use --set parallel.transport=NAME.",
    "ask --transport": "Use --set parallel.transport=NAME.",
    "ask --model": "Use --set model.path=PATH.",
    "ask --max-new-tokens": "Use --set generation.max_new_tokens=NUMBER.",
    "ask --reuse": "Use --set questions.reuse=never.",
    "ask --sharded": "Use --set questions.sharded=true.",
    "verify --architectures": "in a clone of the repository, run `python -m benchmarks architectures`.",
}
