"""Jobs whose ranks hold stored documents together: each is read once for all of its questions, and given back."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from typing import Any
from weakref import WeakSet

import pytest
import torch
from transformers import AutoConfig

from kvr_mpi.kv.shares import Share
from kvr_mpi.prefill.memory_budget import GIB, footprint_of
from kvr_mpi.store.kv import StoredLayer

QUESTIONS = ("Who wrote it, and what for?", "When?", "What is it about, in one word?")
DOCUMENTS = ("doc-2.txt", "doc-3.txt", "doc-4.txt")


@pytest.mark.slow
def test_a_document_is_read_once_and_given_back_where_the_next_does_not_fit_beside_it(
    run_job: Any, ask_about: Any, tiny_model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all of them, and for one and a question or two: the answers of one rank that holds everything."""
    run = run_job(1, "output.kv=true", "generation.max_new_tokens=1", "prompt.max_tokens=400").folder
    chosen = f"questions.documents={list(DOCUMENTS)}"
    whole = run_job(1, chosen, of=ask_about(run, *QUESTIONS))
    found = whole.records.values()
    longest, fresh = max(one.prompt_tokens for one in found), [one.computed_tokens for one in found]
    config = AutoConfig.from_pretrained(tiny_model_dir)
    each = config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * 4
    room = each * (-(-longest // 2) + 40) + footprint_of(config, torch.float32).activation_bytes(max(fresh))

    reads, held, most = Counter[str](), defaultdict[int, WeakSet[Share]](WeakSet), [0]
    read, load, lock = StoredLayer.read, Share.prepare, threading.Lock()

    def watched_read(layer: StoredLayer, first: int = 0, last: int | None = None) -> Any:
        with lock:
            reads[layer.keys.name] += 0 if last is None else last - first  # else how fast files are read is measured
        return read(layer, first, last)

    def watched_load(share: Share, layer_idx: int) -> None:
        load(share, layer_idx)
        mine = held[threading.get_ident()]
        if share.prefix is not None:
            mine.add(share)
        most[-1] = max(most[-1], sum(store.nbytes for one in mine for store in one.stores))

    monkeypatch.setattr(StoredLayer, "read", watched_read)
    monkeypatch.setattr(Share, "prepare", watched_load)
    for memory in ((), (f"parallel.memory_gib={room / GIB:.9f}",)):
        reads.clear(), held.clear(), most.append(0)
        ran = run_job(2, "parallel.ranks_per_chain=all", chosen, *memory, of=ask_about(run, *QUESTIONS))
        assert ran.tokens == whole.tokens and all(0 < record.computed_tokens < 40 for record in ran.records.values())
        once = Counter(tokens for tokens in reads.values() if tokens)  # of each document in all layers the same
        assert sorted(once.values()) == [3] * len(DOCUMENTS) and max(once) <= longest
    assert most[2] <= room < most[1]
