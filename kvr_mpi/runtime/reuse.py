"""Reuse of stored keys and values for prompts that share a prefix with stored ones, such as documents that grew.

After every 256 tokens of a stored prompt, all tokens so far are hashed. The hashes of a new prompt are looked up among
these, longest first. The match's keys and values are loaded after its stored tokens are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from kvr_mpi.errors import DataError
from kvr_mpi.job.combinations import REUSE, why_no_effect
from kvr_mpi.job.model_kinds import kinds_of
from kvr_mpi.plain import from_plain
from kvr_mpi.runtime.asking import check_made_by
from kvr_mpi.runtime.session import Session
from kvr_mpi.store.kv import BLOCK_TOKENS
from kvr_mpi.store.kv_reader import read_prompt
from kvr_mpi.store.prefix import StoredPrefix
from kvr_mpi.store.results import read_results
from kvr_mpi.transport import on_root, share_json, together


@dataclass(frozen=True, slots=True)
class StoredBeginnings:
    """The token blocks with which stored prompts begin.

    documents : location of each document's keys and values.
    hashes : maps the hash of all tokens up to a block's end to an index in `documents`.
    passed_over : number of documents that are skipped because they are compressed.
    """

    documents: list[StoredPrefix]
    hashes: dict[str, int]
    passed_over: int = 0

    def find(self, ids: Sequence[int]) -> StoredPrefix | None:
        """Find the longest stored prefix of a prompt that leaves at least one token; None if there is none."""
        for count, found in reversed(list(enumerate(hash_blocks(ids[: len(ids) - 1]), 1))):
            number = self.hashes.get(found)
            if number is not None:
                return replace(self.documents[number], tokens=count * BLOCK_TOKENS)
        return None


def hash_blocks(ids: Sequence[int]) -> list[str]:
    """Return, for each whole block, the hash of all tokens up to its end."""
    digest, found = xxhash.xxh3_128(), []
    data = np.asarray(ids, "<i8")
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        digest.update(data[start : start + BLOCK_TOKENS].tobytes())
        found.append(digest.hexdigest())
    return found


def scan_beginnings(path: str) -> StoredBeginnings:
    """List the token blocks with which the prompts of a run begin; raises `DataError` if the run cannot be read."""
    results = read_results([Path(path)])
    found, passed_over = StoredBeginnings([], {}), 0
    for name in results.ids("done"):
        if not results.places[name].pieces:
            continue
        try:
            whose = read_prompt(results.places[name].pieces)
        except DataError:
            continue  # not used; `kvr inspect` explains the error
        if whose is None:
            continue
        if whose.compression:  # records of new answers would not show the compression
            passed_over += 1
            continue
        for each in hash_blocks(whose.ids):
            found.hashes.setdefault(each, len(found.documents))
        found.documents.append(StoredPrefix(name, results.places[name].pieces, len(whose.ids)))
    return replace(found, passed_over=passed_over)


def find_beginnings(session: Session) -> StoredBeginnings | None:
    """List the prefixes of the prompts in `documents.reuse`, if this model can continue them; every rank calls this.

    Raises `ConfigError` if another model produced them; `DataError` if the run cannot be read.
    """
    spec, world, logger = session.spec, session.ranks.world, session.logger.root
    path = spec.documents.reuse
    assert path is not None
    weights = str(session.header.model["weights"])
    together(world, partial(check_made_by, "documents.reuse", [path], spec, session.loaded, weights))
    if why := why_no_effect(REUSE, spec, kinds_of(session.loaded)):
        logger.info(f"documents.reuse: nothing is reused: {why}")
        return None
    found = from_plain(StoredBeginnings, share_json(world, on_root(world, lambda: asdict(scan_beginnings(path)))))
    count = len(found.documents)
    logger.info(f"documents.reuse: prompts start from the longest prefix they share with one of {count} stored prompts")
    if found.passed_over:
        logger.info(f"documents.reuse: {found.passed_over} stored prompts are compressed, and are not reused")
    return found
