"""What is stored of a prompt, by however many ranks: going on from it gives the bits that going on from memory gives.

So answers can differ from a fresh prefill's only by what the number and bounds of slices round differently.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_runs import HEADER
from models import prompt, tiny

from kvr_mpi.kv.chain import layer_kv
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import own_pool, prefill_kvr
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.store.kv import CachedTokens
from kvr_mpi.store.prefix import StoredPrefix
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.writer import ResultWriter
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import run_local

TOKENS, QUESTION = 290, 12


def write_slices(folder: Path, loaded: LoadedModel, ids: list[int], bounds: tuple[int, ...]) -> None:
    """Prefill over threads, each of which writes its own slice as the ranks of a job do."""
    partition, last = Partition(bounds), len(bounds) - 2
    of = Record("a", "done", slices=bounds, prompt_sha256="0" * 64, prompt_tokens=len(ids))

    def work(chain: Transport) -> None:
        start, stop = bounds[chain.rank], bounds[chain.rank + 1]
        tokens = CachedTokens(ids[:stop], (0, stop), start)
        writer = ResultWriter(folder, chain.rank, HEADER, session=1)
        if chain.rank == last:
            done = prefill_kvr(loaded, ids, partition, chain)
            layers = [layer_kv(done.cache, layer, start) for layer in range(len(done.cache.layers))]
            writer.write(of, layers, tokens)
        else:
            with writer.writing_piece(of, tokens) as document:
                prefill_kvr(loaded, ids, partition, chain, write_layer=document.add_layer)
        writer.close()

    run_local(len(bounds) - 1, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounds", [(0, 290), (0, 170, 290), (0, 100, 101, 290), (0, 90, 160, 230, 290)])
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gemma2-softcap"])
def test_to_the_bit_what_memory_gives(tmp_path: Path, name: str, bounds: tuple[int, ...], dtype: torch.dtype) -> None:
    loaded = tiny(name, dtype)
    ids = prompt(TOKENS + QUESTION)
    prepare_model(loaded.model, chain=True)
    write_slices(tmp_path, loaded, ids[:TOKENS], bounds)
    partition = Partition(bounds)
    kept = run_local(
        partition.size, lambda chain: prefill_kvr(loaded, ids[:TOKENS], partition, chain, keeps_all=True).cache
    )
    stored = StoredPrefix("a", open_results(tmp_path).places["a"].pieces, TOKENS).open(ids, loaded, own_pool(loaded))
    kept[-1].ids = tuple(ids[:TOKENS])
    prefixes = (kept[-1], stored)
    ((one,), (other,)) = (prefill_packed(loaded, [ids], prefix=each, reserve_tokens=1) for each in prefixes)
    assert one.logits is not None and other.logits is not None and torch.equal(one.logits, other.logits)
    for layer in range(len(one.cache.layers)):
        for here, there in zip(layer_kv(one.cache, layer), layer_kv(other.cache, layer), strict=True):
            assert torch.equal(here, there)
