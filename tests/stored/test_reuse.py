"""Prompts that begin like stored ones: the same answers, with only the rest computed, over chains too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_jobs import TEXT

from kvr_mpi.store.kv import BLOCK_TOKENS
from kvr_mpi.stored.prompt import StoredPrefix
from kvr_mpi.stored.reuse import StoredBeginnings, hash_blocks

MORE = "And then the harbour master wrote a second letter, which nobody answered. "


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "more"), [(3, ("parallel.partition=equal_time",)), (2, ("parallel.strategy=ring",))])
def test_answers_are_the_same_and_only_the_rest_is_computed(
    tmp_path: Path, run_job: Any, ranks: int, more: tuple[str, ...]
) -> None:
    """Of documents that have grown since they were stored, and of a new one that begins like another."""
    corpus = tmp_path / "corpus"
    (corpus / "doc-3.txt").write_text("The third. " + TEXT * 14)
    (corpus / "doc-4.txt").write_text("The fourth. " + TEXT * 17)
    old = run_job(2, "output.kv=true", "generation.max_new_tokens=2").folder
    for name in ("doc-1.txt", "doc-3.txt"):
        (corpus / name).write_text((corpus / name).read_text() + MORE * 3)
    fourth = (corpus / "doc-4.txt").read_text()
    (corpus / "new.txt").write_text(fourth[: len(fourth) * 9 // 10] + MORE * 4)
    truth, reused = run_job(1).records, run_job(ranks, f"documents.reuse={old}", *more)
    assert "with one of 5 stored prompts" in reused.log
    found = reused.records
    assert len(found) == 6 and found.keys() == truth.keys()
    for name, record in found.items():
        assert record.token_ids == truth[name].token_ids, name
        assert record.prompt_tokens == truth[name].prompt_tokens
    known = {name: record.prompt_tokens - record.computed_tokens for name, record in found.items()}
    assert {name for name, tokens in known.items() if tokens == 256} == {"doc-3.txt", "doc-4.txt", "new.txt"}
    assert all(tokens < 64 for tokens in known.values() if tokens != 256), "at most what all prompts begin with"


def test_the_longest_stored_beginning_that_leaves_a_token_is_found() -> None:
    ids = list(range(2 * BLOCK_TOKENS + 1))
    hashes = hash_blocks(ids)
    assert len(set(hashes)) == 2 and hash_blocks([7, *ids[1:]])[1] != hashes[1] and hash_blocks(ids[:255]) == []
    stored = StoredBeginnings([StoredPrefix("a", (), len(ids))], dict.fromkeys(hashes, 0))
    for tokens, known in ((len(ids), 2), (2 * BLOCK_TOKENS, 1), (BLOCK_TOKENS + 1, 1), (BLOCK_TOKENS, 0)):
        found = stored.find(ids[:tokens])
        assert (0 if found is None else found.tokens) == known * BLOCK_TOKENS
    assert stored.find([7, *ids[1:]]) is None
