"""Jobs whose ranks hold stored documents together: each is read once for all of its questions, and given back."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from weakref import WeakSet

import pytest
import torch
from transformers import AutoConfig

from kvr_mpi.kv.shares import Share
from kvr_mpi.prefill.memory_budget import GIB, footprint_of
from kvr_mpi.store.results import open_results
from kvr_mpi.store.stored_kv import StoredLayer

QUESTIONS = ("Who wrote it, and what for?", "When?", "What is it about, in one word?")
DOCUMENTS = ("doc-2.txt", "doc-3.txt", "doc-4.txt")


class Watch:
    """What a job's ranks read of documents, and how many of these they hold at a time, ranks being threads.

    read : tokens of each layer's keys that were asked for, by their place in the file.
    most_bytes : of all documents that a rank held at once, on the rank that held most.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: dict[str, int] = defaultdict(int)
        self.most_bytes = 0
        self._held: dict[int, WeakSet[Share]] = defaultdict(WeakSet)
        self._lock = threading.Lock()
        read, load = StoredLayer.read, Share.prepare

        def watched_read(layer: StoredLayer, first: int = 0, last: int | None = None) -> Any:
            if last is not None:  # else how fast files are read here is measured
                with self._lock:
                    self.read[layer.keys.name] += last - first
            return read(layer, first, last)

        def watched_load(share: Share, layer_idx: int) -> None:
            load(share, layer_idx)
            held = self._held[threading.get_ident()]
            if share.prefix is not None:
                held.add(share)
            self.most_bytes = max(self.most_bytes, sum(one.bytes for one in held))

        monkeypatch.setattr(StoredLayer, "read", watched_read)
        monkeypatch.setattr(Share, "prepare", watched_load)


def check_read_once(watch: Watch, run: Path) -> None:
    """Of every layer of every document each token up to the end of the text was read once, whatever was asked."""
    texts = {record.id: record for record in open_results(run, verify=False) if record.id in DOCUMENTS}
    found: dict[str, set[int]] = defaultdict(set)
    for name, tokens in watch.read.items():
        found[unquote(name.split("/")[2]).rpartition("/")[0]].add(tokens)
    assert found.keys() == texts.keys() and len(watch.read) == 3 * len(texts)
    for name, tokens in found.items():
        assert len(tokens) == 1 and max(tokens) <= texts[name].prompt_tokens, (name, tokens)


@pytest.mark.slow
def test_a_document_is_read_once_and_given_back_where_the_next_does_not_fit_beside_it(
    run_job: Any, ask_about: Any, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all of them, and for one and a question or two: the answers of one rank that holds everything."""
    run = run_job(1, "output.kv=true", "generation.max_new_tokens=1", "prompt.max_tokens=400").folder

    def ask(ranks: int, *settings: str) -> Any:
        """Ask about three documents, which all ranks hold together."""
        spread = ("parallel.ranks_per_chain=all", f"questions.documents={list(DOCUMENTS)}")
        return run_job(ranks, *spread, *settings, of=ask_about(run, *QUESTIONS))

    whole = ask(1, "parallel.ranks_per_chain=1")
    wanted, found = whole.tokens, whole.records.values()
    assert len(wanted) == len(DOCUMENTS) * len(QUESTIONS)
    with monkeypatch.context() as patched:
        watch = Watch(patched)
        roomy = ask(2)
        most_bytes = watch.most_bytes
        check_read_once(watch, run)
    assert roomy.tokens == wanted and all(0 < record.computed_tokens < 40 for record in roomy.records.values())
    longest, fresh = max(one.prompt_tokens for one in found), [one.computed_tokens for one in found]
    config = AutoConfig.from_pretrained(tiny_model_dir)
    each = config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * 4
    activation_bytes = footprint_of(config, torch.float32).activation_bytes
    room = each * (-(-longest // 2) + 40) + activation_bytes(max(fresh))
    watch = Watch(monkeypatch)
    tight = ask(2, f"parallel.memory_gib={room / GIB:.9f}")
    check_read_once(watch, run)
    assert tight.tokens == wanted
    assert watch.most_bytes <= room - activation_bytes(min(fresh)) < most_bytes
