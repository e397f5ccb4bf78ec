"""Distribution of keys and values from the ranks that prefilled documents to the ranks that own the heads.

`head_parallel` calls this after the prefills. Documents are distributed one at a time. Each owner receives one message
with its heads' keys and values, layer by layer; then the home rank drops the whole cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvr_mpi.decode.group import Running
from kvr_mpi.kv.arena import Arena, make_rows
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.model import LoadedModel
from kvr_mpi.prefill.one_prompt import Prefill, make_decode_cache
from kvr_mpi.transport import Transport
from kvr_mpi.transport.base import FixedTag, gather_json, share_json

# Rows of a KV head that go to one rank: the head, the first row and the one after the last, among the rows it holds.
Part = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SharedDocument:
    """A document as all ranks know it.

    home : the rank that prefilled it, and writes its answer.
    tokens : its length.
    slack : tokens that may still be appended.
    last_token : the token written last.
    is_greedy : whether the next token is just the argmax of the logits.
    counts : number of its keys, by layer and KV head.
    """

    home: int
    tokens: int
    slack: int
    last_token: int
    is_greedy: bool
    counts: tuple[tuple[int, ...], ...]


def tell_documents(ranks: Transport, documents: Sequence[Running[Any]]) -> list[SharedDocument]:
    """Gather the documents of all ranks into one list, which is the same on all ranks.

    The list alternates between ranks, so that each rank sends about as much at a time as it receives.
    """
    mine = []
    for document in documents:
        cache, writing = document.prefill.cache, document.writing
        assert writing is not None, "it is this rank's own"
        counts = [layer.head_counts for layer in cache.layers]
        mine.append([cache.length, writing.room, document.last_token, writing.is_greedy, counts])
    everyone = share_json(ranks, gather_json(ranks, mine))
    shared = []
    for turn in itertools.zip_longest(*everyone):
        for home, told in enumerate(turn):
            if told is not None:
                tokens, slack, token, is_greedy, counts = told
                shared.append(SharedDocument(home, tokens, slack, token, is_greedy, tuple(map(tuple, counts))))
    return shared


def share_documents(
    loaded: LoadedModel,
    ranks: Transport,
    documents: Sequence[SharedDocument],
    prefills: Sequence[Prefill],
    parts_of: Callable[[int, int], list[list[Part]]],
    heads: Sequence[Sequence[int]],
    arena: Arena | None,
    *,
    appends: bool = True,
) -> list[SliceCache]:
    """Send every rank the rows it owns of every document; every rank calls this.

    Parameters
    ----------
    documents : sequence of SharedDocument
        Of all ranks.
    prefills : sequence of Prefill
        Of this rank's documents among them; their caches are dropped.
    parts_of : callable
        Returns the parts of a document (by index) that a rank owns, by layer, heads ascending.
    heads : sequence of sequence of int
        For each layer the KV heads this rank's model computes.
    arena : Arena or None
        Page pool for the rows that this rank owns.
    appends : bool
        Whether this rank keeps new tokens for the heads that it owns.

    Returns
    -------
    list of SliceCache
        Of all documents, with the rows that this rank owns.
    """
    own, caches = iter(prefills), []
    for at, document in enumerate(documents):
        owned = [parts_of(at, rank) for rank in range(ranks.size)]
        stores = _make_stores(loaded, document, owned[ranks.rank], heads, arena, appends)
        if document.home == ranks.rank:
            prefill = next(own)
            _hand_out(ranks, prefill.cache, owned, stores)
            prefill.cache = None
        else:
            _receive(ranks, document, stores, loaded)
        caches.append(make_decode_cache(loaded, stores, document.tokens, document.slack))
    return caches


def _make_stores(
    loaded: LoadedModel,
    document: SharedDocument,
    owned: Sequence[Sequence[Part]],
    heads: Sequence[Sequence[int]],
    arena: Arena | None,
    appends: bool,
) -> list[HeadStore]:
    """Allocate the rows that this rank owns of a document."""
    shapes, slack = loaded.shape.layers, document.slack if appends else 0
    kept = [[last - first for _, first, last in parts] for parts in owned]
    return [
        HeadStore.by_heads(
            make_rows(shape, counts, slack, loaded.dtype, loaded.device, arena),
            replace(shape, num_kv_heads=len(computed)),
            counts,
            slack,
            document.tokens,
            [list(computed).index(head) for head, _, _ in parts],
            appends=appends,
        )
        for shape, counts, parts, computed in zip(shapes, kept, owned, heads, strict=True)
    ]


def _hand_out(
    ranks: Transport, cache: SliceCache, owned: Sequence[Sequence[Sequence[Part]]], stores: Sequence[HeadStore]
) -> None:
    """Send every rank the rows it owns, and copy this rank's own."""
    requests = []
    for rank, by_layer in enumerate(owned):
        rows = [
            held[first:last]
            for layer, parts in zip(cache.layers, by_layer, strict=True)
            for head, first, last in parts
            for held in layer.head(head)
        ]
        if rank == ranks.rank:
            for place, part in zip(_places(stores, cache.length), rows, strict=True):
                place.copy_(part)
        elif message := [part.flatten() for part in rows]:
            requests.append(ranks.isend(torch.cat(message), rank, FixedTag.SHARED_HEADS))
    for request in requests:
        request.wait()


def _receive(ranks: Transport, document: SharedDocument, stores: Sequence[HeadStore], loaded: LoadedModel) -> None:
    """Receive the rows that this rank owns of another rank's document."""
    places = list(_places(stores, document.tokens))
    if not places:
        return
    message = torch.empty(sum(place.numel() for place in places), dtype=loaded.dtype, device=loaded.device)
    ranks.irecv(message, document.home, FixedTag.SHARED_HEADS).wait()
    for place, part in zip(places, torch.split(message, [place.numel() for place in places]), strict=True):
        place.copy_(part.view(place.shape))


def _places(stores: Sequence[HeadStore], length: int) -> Iterator[torch.Tensor]:
    """Yield where each head's keys and values go, in the order of a message."""
    for store in stores:
        for at in range(len(store.heads)):
            yield from store.own_rows(at, length)
