"""Steps for one GPU that say whether what it computes is right, and what it waits for."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_machine import make_tokenizer, model_of, random_model
from gpu_steps import Absent, Figures, Given

from kvr_mpi.cli.environment import read_environment
from kvr_mpi.kv.attention import PartialAttention, attend
from kvr_mpi.logs import RankLogger
from kvr_mpi.model import load_model
from kvr_mpi.model.attention_hook import AttentionParams, prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import error_share
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.runtime.verify import verify
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.tuning.kernels import fuse_on_gpus

KEYS, WINDOW = 4096, 256
# Of the largest output, by dtype: what rounding of inputs and outputs allows.
ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}
# Layouts of quantised weights, and the package without which they are expanded, or refused. Inputs may be rounded to as
# few bits; with wrong scales, errors would be as large as the logits' spread.
LAYOUTS = {"fp8": "kernels", "mxfp4": "kernels", "compressed_tensors": "compressed_tensors"}
QUANTISED_ALLOWED = 0.15
# Of the 8B shape, with a third of its layers.
SMALL: dict[str, Any] = {"num_hidden_layers": 4, "vocab_size": 32000}


def truth_of(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    first: int | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in float64; query i stands at key ``first + i``, or sees all."""
    group = query.shape[1] // keys.shape[1]
    scores = query.double() @ keys.double().repeat_interleave(group, 1).transpose(-1, -2) * params.scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if first is not None:
        at_query, at_key = (torch.arange(rows.shape[2], device=query.device) for rows in (query, keys))
        behind = at_query[:, None] + first - at_key
        seen = (behind >= 0) & (behind < (window or keys.shape[2] + 1))
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ values.double().repeat_interleave(group, 1), scores.logsumexp(-1)


def error_of(part: PartialAttention, truth: tuple[torch.Tensor, torch.Tensor]) -> float:
    """How far output and log-sum-exp are off, of the largest of each."""
    pairs = zip((part.out, part.lse), truth, strict=True)
    return max(float((mine.double() - theirs).abs().max() / theirs.abs().max()) for mine, theirs in pairs)


def attention_is_exact(given: Given) -> Figures:
    """All, causal, windowed and merged attention, token-major as buffers lie, against float64."""
    device = torch.device(given.device)
    draw, worst = torch.Generator(device).manual_seed(0), {str(dtype): 0.0 for dtype in ALLOWED}
    length, dims = (320, (64,)) if given.is_small else (KEYS, (64, 128, 256))
    for dtype, dim, queries, heads in itertools.product(ALLOWED, dims, (1, 10, length), (8, 2)):
        query = torch.randn(1, 8, queries, dim, generator=draw, device=device, dtype=dtype)
        rows = torch.randn(2, length, heads, dim, generator=draw, device=device, dtype=dtype)
        keys, values = (row.transpose(0, 1).unsqueeze(0) for row in rows)
        params = AttentionParams(dim**-0.5)
        cuts = slice(0, length // 3), slice(length // 3, length)
        part, other = (attend(query, keys[:, :, cut], values[:, :, cut], params) for cut in cuts)
        cases = {
            "all": (attend(query, keys, values, params), None, None),
            "merged": (part.merge(other), None, None),
            "window": (attend(query, keys, values, params, causal=True, window=WINDOW), length - queries, WINDOW),
        }
        if queries == length:
            cases["causal"] = (attend(query, keys, values, params, causal=True), 0, None)
        for name, (part, first, window) in cases.items():
            error = error_of(part, truth_of(query, keys, values, params, first, window))
            worst[str(dtype)] = max(worst[str(dtype)], error)
            assert error <= ALLOWED[dtype], f"{name}, {dtype}, head_dim {dim}, {queries} queries, {heads}: {error:.1e}"
    return {f"worst error, {dtype}": error for dtype, error in worst.items()}


def pretrained_is_exact(given: Given) -> Figures:
    """The demo's model, in float32 and bfloat16, by verify's rule; the truth is transformers' on the CPU."""
    load = partial(load_model, model_of(replace(given, model="")), offline=True)
    load = partial(load, cache_dir=read_environment().cache_dir)
    exact, found = load(dtype="float32", device="cpu"), dict[str, Any]()
    for dtype in ("float32", "bfloat16"):
        loaded = load(dtype=dtype, device=given.kind)
        fuse_on_gpus(loaded, LocalTransport(), RankLogger())  # as jobs do
        findings = list(verify(loaded, LocalTransport(), [24] if given.is_small else [64, 500, 4000], exact=exact))
        assert findings and all(each.holds for each in findings), findings
        found |= {f"{dtype}, {each.tokens} tokens, {each.slices}": each.logits_error for each in findings}
        found |= {f"{dtype}, {each.tokens} tokens, allowed": each.allowed for each in findings}
    return found


def quantised_is_exact(given: Given) -> Figures:
    """Folders of quantised weights, multiplied as they are stored, against the weights that they stand for."""
    sys.path.append(str(Path(__file__).parents[1]))
    made_folders: Any = import_module("made_folders")
    found, width = dict[str, Any](), 64 if given.is_small else 512
    shape = made_folders.SMALL | {"hidden_size": width, "intermediate_size": 2 * width, "initializer_range": 0.05}
    for layout, package in LAYOUTS.items():
        if find_spec(package) is None and not (given.is_small and package == "kernels"):  # CPUs expand them
            continue
        pair = [Path(given.output) / f"{layout}-{name}" for name in ("stored", "plain")]
        for folder in pair:
            made_folders.save_plain(folder, transformers.LlamaConfig(**shape))
            make_tokenizer(folder)
        getattr(made_folders, layout)(*pair)
        load = partial(load_model, dtype="bfloat16", device=given.kind, cache_dir=Path(given.output))
        logits = []
        for loaded in (load(str(folder)) for folder in pair):
            ids = loaded.shape.sample_ids(200, 7, 3)
            prepare_model(loaded.model, chain=True)
            logits.append(prefill_kvr(loaded, ids, Partition((0, 200)), LocalTransport()).logits)
            stored = sum(each.dtype.itemsize < 2 for each in loaded.model.state_dict().values())
            found.setdefault(f"{layout}, tensors of fewer bits", stored)
        found[f"{layout}, error, of the logits' spread"] = error = error_share(*logits)
        assert error <= QUANTISED_ALLOWED, f"{layout}: {error:.2f}"
    if not found:
        raise Absent(f"none of the packages {', '.join(sorted({*LAYOUTS.values()}))} is installed")
    return found


def nothing_synchronises(given: Given) -> Figures:
    """What makes the host wait for the GPU within a prefill: in each layer it should be nothing."""
    loaded = random_model(given, **SMALL)
    prepare_model(loaded.model, chain=True)
    ids = loaded.shape.sample_ids(2048, 7, 3)
    prefill_kvr(loaded, ids, Partition((0, 2048)), LocalTransport())
    if given.kind == "cuda":  # on a CPU nothing waits
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        prefill_kvr(loaded, ids, Partition((0, 2048)), LocalTransport())
    places = Counter(
        f"{one.filename.rpartition('/')[2]}:{one.lineno}" for one in seen if "synchroniz" in str(one.message)
    )
    where = ", ".join(f"{place} x{count}" for place, count in places.most_common(8))
    assert max(places.values(), default=0) < SMALL["num_hidden_layers"], f"once a layer or more: {where}"
    return {"waits": sum(places.values()), "where": where}


def memory_runs_out(given: Given) -> Figures:
    """Three ranks as threads on one GPU; the second asks for more than there is, once."""
    loaded = random_model(given, **SMALL)
    prepare_model(loaded.model, chain=True)
    ids, cut = loaded.shape.sample_ids(3000, 7, 3), Partition((0, 1200, 2200, 3000))
    truth = prefill_kvr(loaded, ids, Partition((0, 3000)), LocalTransport()).logits
    assert truth is not None
    is_greedy = [False] * 3

    def work(chain: LocalTransport) -> tuple[str | None, float]:
        def ask(*given: Any) -> None:
            mine = threading.current_thread().name == "rank 1"  # all run the same layers
            if mine and is_greedy[1]:
                torch.empty(1 << 50, dtype=torch.uint8, device=loaded.device)

        layer = loaded.model.model.layers[1]
        hook = layer.register_forward_pre_hook(ask) if chain.rank == 1 else None
        forwarder = Forwarder(chain, device=loaded.device)
        is_greedy[1] = True
        chain.barrier()
        first = prefill_kvr(loaded, ids, cut, chain, forwarder=forwarder, spares_chain=True)
        chain.barrier()
        is_greedy[1] = False
        chain.barrier()
        second = prefill_kvr(loaded, ids, cut, chain, forwarder=forwarder, spares_chain=True)
        forwarder.close()
        if hook is not None:
            hook.remove()
        error = 0.0 if second.logits is None else float((second.logits - truth).abs().max() / truth.std())
        return first.error, error

    *_, (told, error) = run_local(3, work, loaded.device)
    assert told is not None and "rank 1 of the 3 in its chain ran out of memory" in told, told
    assert error < 0.2, f"the next prompt's logits differ by {error:.2f} of their spread"
    return {"said": told, "next prompt's error, of the logits' spread": error}
