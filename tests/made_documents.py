"""A document whose keys and values are there to be read, and questions about it, for ranks that are threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from models import prompt

from kvr_mpi.kv.contents import layer_kv
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.kv.shares import Share
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.stored_shares import share_out_stored
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import LocalTransport


def questions_after(document: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Prompts that begin with a document and go on in so many other tokens."""
    return [
        [*document, *((29 * number + 7 * at) % 190 + 1 for at in range(length))]
        for number, length in enumerate(lengths)
    ]


@dataclass
class StoredRows:
    """What is stored of a document, by layer (tokens, elements), and who read what of it.

    reads : (rank, layer, first, last) of every call.
    """

    loaded: LoadedModel
    ids: list[int]
    layers: list[torch.Tensor]
    reads: list[tuple[int, int, int, int]] = field(default_factory=list)

    def open_on(self, chain: Transport, longest_question: int) -> Share:
        """This rank's share, the last rank having the last one."""

        def read(number: int, first: int, last: int) -> torch.Tensor:
            self.reads.append((chain.rank, number, first, last))
            return self.layers[number][first:last].clone()

        known, place = len(self.ids), chain.rank
        partition = share_out_stored(known, known, chain.size)
        prefix, longest = SharedPrefix(tuple(self.ids), (), read=read), known + longest_question
        return Share(self.loaded, partition.start(place), partition.stop(place), known, longest, prefix=prefix)


def store_rows(loaded: LoadedModel, tokens: int) -> StoredRows:
    """Prefill a document on one rank, all of it kept."""
    prepare_model(loaded.model, chain=True)
    ids = prompt(tokens)
    cache = prefill_kvr(loaded, ids, Partition((0, tokens)), LocalTransport(), keeps_all=True).cache
    pairs = [layer_kv(cache, layer) for layer in range(len(cache.layers))]
    return StoredRows(loaded, ids, [torch.cat([each.flatten(1) for each in pair], 1).clone() for pair in pairs if pair])
