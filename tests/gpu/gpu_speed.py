"""Steps that measure: time to first token, decoding, and what a machine takes in general."""

from __future__ import annotations

import json
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from gpu_correctness import SMALL
from gpu_machine import random_model, rank_count, wait_for
from gpu_ranks import launch
from gpu_steps import Absent, Figures, Given, run_command
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile
from transformers import GenerationConfig

from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.step_graph import STEPS_BEFORE, STEPS_CHECKED
from kvr_mpi.kv.pool import PAGE_ROWS, Pool, pages_for
from kvr_mpi.kv.row import Row
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.fused import FusedForward
from kvr_mpi.model.kernels import kernels_of
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr, prefill_single, prefill_whole
from kvr_mpi.prefill.packed import run_row
from kvr_mpi.transport.local import LocalTransport, run_local

CONTEXTS = (16_384, 32_768)
PROMPT, STEPS, REPEATS = 2048, 16, 5
VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
model = LLM(sys.argv[1], max_model_len=int(sys.argv[2]) + 8, enable_prefix_caching=False)
found = []
for turn in range(3):
    ids = [(turn + 7 * at) % 1000 + 5 for at in range(int(sys.argv[2]))]
    began = time.perf_counter()
    model.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1))
    found.append(time.perf_counter() - began)
print("seconds: " + json.dumps(found))
"""


def _first_tokens(given: Given, loaded: LoadedModel, ids: list[int]) -> dict[str, float]:
    """Seconds of each way to compute a prompt: the middle of five, in turn, after one that is not counted."""
    times: dict[str, list[float]] = {"kvr": [], "kvr, not fused": [], "transformers": []}
    for way, taken in list(times.items()) * (REPEATS + 1):
        prepare_model(loaded.model, chain=way != "transformers")
        if way == "kvr, not fused":
            _unfuse(loaded)
        wait_for(given)
        began = time.perf_counter()
        if way == "transformers":
            prefill_single(loaded.model, ids, loaded.device)
        else:
            prefill_whole(loaded, ids)
        wait_for(given)
        taken.append(time.perf_counter() - began)
    return {way: statistics.median(taken[1:]) for way, taken in times.items()}


def _unfuse(loaded: LoadedModel) -> None:
    """Use the model's own gates and rotary embeddings until it is prepared again."""
    for name, kernel in kernels_of(loaded.model).items():
        if isinstance(kernel, FusedForward):
            vars(loaded.model.get_submodule(name)).pop(kernel.slot, None)


def contexts_of(given: Given) -> tuple[int, ...]:
    """Lengths of the prompts whose first token is timed."""
    return (256,) if given.is_small else CONTEXTS


def dtype_of(given: Given) -> str:
    """What commands compute in: what a CPU is slow in says nothing of a GPU."""
    return "float32" if given.is_small else "bfloat16"


def decode_together(given: Given) -> Figures:
    """Milliseconds a step, of sequences of 2048 tokens that are decoded together: each alone, and in pages."""
    loaded = random_model(given)
    found: Figures = {"layers": len(loaded.shape.layers), "tokens of each": PROMPT}
    for sequences in (1, 3) if given.is_small else (1, 8, 32, 128):
        for way in ("own memory", "pages", "pages, not fused"):
            prepare_model(loaded.model, chain=True)
            if way == "pages, not fused":
                _unfuse(loaded)
            name = f"{sequences}, {way}"
            try:
                step_s, why_not = _step_seconds(given, loaded, sequences, way)
            except torch.OutOfMemoryError:
                found[f"ms a step, {name}"] = "no room"
                continue
            found |= {f"ms a step, {name}": 1e3 * step_s, f"tokens/s, {name}": sequences / step_s}
            found |= {f"recorded, {name}": "yes" if why_not is None else why_not}
    return found


def _step_seconds(given: Given, loaded: LoadedModel, sequences: int, way: str) -> tuple[float, str | None]:
    """Seconds of a step, after some; and why it is not recorded as a CUDA graph, if it is not."""
    tokens = PROMPT // 16 if given.is_small else PROMPT
    pool = None
    if way != "own memory":
        room = sequences * PAGE_ROWS * pages_for(tokens + 4 * STEPS)
        pool = Pool(loaded.shape.layers, loaded.dtype, loaded.device, room)
    config = GenerationConfig(do_sample=False, eos_token_id=None)
    batch = DecodeBatch(loaded, config, stop=(), max_new_tokens=4 * STEPS)
    ids = loaded.shape.sample_ids(tokens, 7, 3)
    for sequence in range(sequences):
        prefill = prefill_kvr(
            loaded, ids, Partition((0, tokens)), LocalTransport(), reserve_tokens=4 * STEPS, pool=pool
        )
        batch.add(str(sequence), prefill, ids, sequence)
    for _ in range(STEPS_BEFORE + STEPS_CHECKED + 2):
        batch.step()
    wait_for(given)
    began = time.perf_counter()
    for _ in range(STEPS):
        batch.step()
    wait_for(given)
    return (time.perf_counter() - began) / STEPS, batch.group.recorder.why_not


def first_token(given: Given) -> Figures:
    """A chain of one rank, the same with the model's own gates and rotary embeddings, and plain transformers."""
    loaded = random_model(given)
    found: Figures = {"layers": len(loaded.shape.layers)}
    for tokens in contexts_of(given):
        ids = loaded.shape.sample_ids(tokens, 7919, 13)
        try:
            found |= {f"seconds, {tokens}, {way}": s for way, s in _first_tokens(given, loaded, ids).items()}
        except torch.OutOfMemoryError as error:
            found[f"seconds, {tokens}, no room"] = str(error).splitlines()[0]
            torch.cuda.empty_cache()
    return found


@torch.inference_mode()
def where_time_goes(given: Given) -> Figures:
    """The profiler's tables of a prefill on one rank, of one on four that share the GPU, and of a step of decoding."""
    loaded, device = random_model(given, **SMALL), torch.device(given.device)
    prepare_model(loaded.model, chain=True)
    tokens, folder = 256 if given.is_small else 8192, Path(given.output) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    ids = loaded.shape.sample_ids(tokens, 7919, 13)
    held = prefill_kvr(loaded, ids, Partition((0, tokens)), LocalTransport(), reserve_tokens=4)

    def on_four() -> object:
        return run_local(4, lambda rank: prefill_kvr(loaded, ids, Partition.even(tokens, 4), rank), device)

    found: Figures = {}
    for name, work in (
        ("prefill, 1 rank", lambda: prefill_kvr(loaded, ids, Partition((0, tokens)), LocalTransport())),
        ("prefill, 4 ranks", on_four),
        ("a step", lambda: run_row(loaded, Row([held.cache]), [1])),
    ):
        work()  # what is only done once
        with profile(acc_events=True, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profiled:
            work()
            wait_for(given)
        by = f"self_{'cuda' if given.kind == 'cuda' else 'cpu'}_time_total"
        table = profiled.key_averages().table(sort_by=by, row_limit=25)
        file = folder / f"profile-{name.replace(', ', '-').replace(' ', '-')}.txt"
        file.write_text(table)
        found[name] = str(file)
    return found


def distinct_lengths(given: Given) -> Figures:
    """Milliseconds of a prefill of a length that was not seen before, and of the same length again."""
    loaded, times = random_model(given, **SMALL), dict[str, list[float]](new=[], again=[])
    prepare_model(loaded.model, chain=True)
    first = 200 if given.is_small else 8000
    prefill_whole(loaded, loaded.shape.sample_ids(first - 1, 7, 3))
    for tokens in range(first, first + 24):
        for taken in times.values():
            wait_for(given)
            began = time.perf_counter()
            prefill_whole(loaded, loaded.shape.sample_ids(tokens, 7, 3))
            wait_for(given)
            taken.append(1e3 * (time.perf_counter() - began))
    return {f"ms, {name}": statistics.median(taken) for name, taken in times.items()} | {"tokens": first}


def _named(given: Given) -> str:
    if not given.model:
        raise Absent("needs a model that processes can load: --model FOLDER")
    return given.model


def first_token_of_vllm(given: Given) -> Figures:
    """Of one GPU."""
    model = _named(given)
    if find_spec("vllm") is None:
        raise Absent("vllm is not installed")
    found: Figures = {}
    for tokens in contexts_of(given):
        told = run_command([sys.executable, "-c", VLLM, model, str(tokens)], 70)
        line = next(line for line in told.splitlines() if line.startswith("seconds: "))
        found[f"seconds, {tokens}"] = statistics.median(json.loads(line.removeprefix("seconds: ")))
    return found


def write_profile(given: Given) -> Figures:
    """A lookup table of this machine, measured over all GPUs, and what its links and rates are."""
    model, ranks = _named(given), rank_count(given)
    if ranks < 2:
        raise Absent("one GPU: there are no slices to measure")
    contexts = "256" if given.is_small else "8k,32k"
    folder = str(Path(given.output) / "tables") if given.is_small else "tables"
    settings = (f"model.path={model}", f"model.device={given.kind}", f"model.dtype={dtype_of(given)}")
    words = [word for setting in settings for word in ("--set", setting)]
    told = launch(ranks, "kvr", "search", *words, "--contexts", contexts, "--output", folder, timeout_s=110)
    return {"said": told.strip().splitlines()[-1], "folder": folder}
