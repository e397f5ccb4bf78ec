"""Reuse of stored keys and values for prompts that begin like stored ones.

They are about documents that grew, or that share a long beginning.

Every 256 tokens of a stored prompt have a hash of all tokens up to there. A new prompt's beginning is looked up among
them, the longest first, and held against the stored tokens themselves; its keys and values are loaded, not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvr_mpi.errors import DataError
from kvr_mpi.job import JobSpec
from kvr_mpi.job.combinations import REUSE, why_no_effect
from kvr_mpi.job.model_kinds import kinds_of
from kvr_mpi.model import LoadedModel
from kvr_mpi.store.folder import open_document
from kvr_mpi.store.shares import find_runs, index_runs
from kvr_mpi.store.stored_kv import BLOCK_TOKENS
from kvr_mpi.stored.asking import check_made_by
from kvr_mpi.stored.prompt import StoredPrefix
from kvr_mpi.transport import Transport, on_root, share_json, together


@dataclass(frozen=True, slots=True)
class StoredBeginnings:
    """The token blocks that stored prompts begin with.

    documents : where the keys and values of each are stored.
    hashes : of all tokens up to a block's end, and whose they are.
    passed_over : documents whose keys and values are not those that the model computes.
    """

    documents: list[StoredPrefix]
    hashes: dict[str, int]
    passed_over: int = 0

    def to_json(self) -> list[Any]:
        """Return plain values."""
        return [list(map(asdict, self.documents)), self.hashes, self.passed_over]

    @classmethod
    def from_json(cls, documents: list[Any], hashes: dict[str, int], passed_over: int) -> StoredBeginnings:
        """Reconstruct it from the result of `to_json`."""
        return cls(list(map(StoredPrefix.from_json, documents)), hashes, passed_over)

    def find(self, ids: Sequence[int]) -> StoredPrefix | None:
        """Find the longest stored prefix of a prompt that leaves at least one token; None if there is none."""
        for count, found in reversed(list(enumerate(hash_blocks(ids[: len(ids) - 1]), 1))):
            number = self.hashes.get(found)
            if number is not None:
                return replace(self.documents[number], tokens=count * BLOCK_TOKENS)
        return None


def hash_blocks(ids: Sequence[int]) -> list[str]:
    """Hash the tokens up to the end of each whole block."""
    digest, found = xxhash.xxh3_128(), []
    data = np.asarray(ids, "<i8")
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        digest.update(data[start : start + BLOCK_TOKENS].tobytes())
        found.append(digest.hexdigest())
    return found


def scan_beginnings(path: str) -> StoredBeginnings:
    """List the token blocks that the prompts of a run begin with.

    Raises
    ------
    DataError
        If the run cannot be read.
    """
    index, _ = index_runs(find_runs([Path(path)]))
    found, passed_over = StoredBeginnings([], {}), 0
    for name in index.ids("done"):
        if not index.places[name].pieces:
            continue
        try:
            with open_document(index, name) as (_, kv):
                whose = kv.tokens
        except DataError:
            continue  # not used; `kvr inspect` says what is wrong with it
        if whose is None:
            continue
        if whose.compression:  # an answer, and what is stored of it, would not say so
            passed_over += 1
            continue
        for each in hash_blocks(whose.ids):
            found.hashes.setdefault(each, len(found.documents))
        found.documents.append(StoredPrefix(name, index.places[name].pieces, len(whose.ids)))
    return replace(found, passed_over=passed_over)


def find_beginnings(
    spec: JobSpec, loaded: LoadedModel, weights: str, world: Transport, say: Callable[[str], None]
) -> StoredBeginnings | None:
    """List the beginnings of the prompts of `documents.reuse` if this model can continue them; every rank calls this.

    Raises
    ------
    ConfigError
        If another model made them.
    DataError
        If the run cannot be read.
    """
    path = spec.documents.reuse
    assert path is not None
    together(world, partial(check_made_by, "documents.reuse", [path], spec, loaded, weights))
    if why := why_no_effect(REUSE, spec, kinds_of(loaded)):
        say(f"documents.reuse: nothing is reused: {why}")
        return None
    found = StoredBeginnings.from_json(*share_json(world, on_root(world, lambda: scan_beginnings(path).to_json())))
    count = len(found.documents)
    say(f"documents.reuse: prompts start from the longest beginning they share with one of {count} stored prompts")
    if found.passed_over:
        say(f"documents.reuse: {found.passed_over} stored prompts are compressed, and are not reused")
    return found
