"""Decoding over sharded keys and values: each rank of a chain attends to its own tokens.

Every rank runs the model on the last tokens, attends to its shares (``kv.shares``), and ends with the same logits. A
prompt's home is the rank that has its last share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvr_mpi.decode.batch import MAX_SEQUENCES
from kvr_mpi.decode.group import BatchEntry, Group
from kvr_mpi.kv.shares import Share
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.stored_shares import run_shares
from kvr_mpi.transport import Transport


class TokenGroup(Group):
    """The ranks of a chain, each with a shard of every prompt.

    ranks : the chain.
    """

    ranks: Transport

    def is_home(self, prefill: Prefill) -> bool:
        """Whether this rank has a prompt's last shard."""
        return self.ranks.rank == prefill.last

    def rows(self, documents: Sequence[BatchEntry], most: int | None) -> list[list[BatchEntry]]:
        """Divide prompts into rows, with those about the same document next to each other, so that it is read once."""
        most = min(most or MAX_SEQUENCES, MAX_SEQUENCES)
        return [list(documents[at : at + most]) for at in range(0, len(documents), most)]

    def run(self, documents: Sequence[BatchEntry]) -> torch.Tensor:
        """Run the model on all ranks; return logits (prompts, vocab_size), the same on all of them."""
        shares = [_share_of(each.prefill) for each in documents]
        logits = run_shares(self.loaded, shares, [[each.last_token] for each in documents], self.ranks)
        for share in shares:
            share.length += 1
        return logits

    def look_ahead(self, prefill: Prefill, ids: Sequence[int]) -> torch.Tensor:
        """Compute logits (tokens, vocab_size) after each of some tokens that follow a prompt, without changing it."""
        return run_shares(self.loaded, [_share_of(prefill)], [ids], self.ranks)


def _share_of(prefill: Prefill) -> Share:
    assert prefill.share is not None, "its keys and values stay spread over the ranks"
    return prefill.share
