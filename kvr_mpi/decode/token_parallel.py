"""Decoding over sharded keys and values: each rank of a chain attends to its own tokens.

Every rank runs the model on the last tokens, attends to the tokens that it keeps, and ends with the same logits
(`prefill.stored_shares`). A prompt's home is the rank that keeps its last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvr_mpi.decode.batch import MAX_SEQUENCES
from kvr_mpi.decode.group import BatchEntry, Group
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.stored_shares import run_sharded
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

    @property
    def why_no_drafts(self) -> str | None:
        """Why no step runs several tokens of a prompt."""
        return "the ranks of a chain that share keys and values have to run the same tokens"

    def run(self, documents: Sequence[BatchEntry], drafts: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        """Run the model on all ranks; return logits (prompts, vocab_size), the same on all of them."""
        sequences = [each.prefill.cache for each in documents]
        logits = run_sharded(self.loaded, sequences, [[each.last_token] for each in documents], self.ranks)
        for sequence in sequences:
            sequence.length += 1
        return logits

    def look_ahead(self, prefill: Prefill, ids: Sequence[int]) -> torch.Tensor:
        """Compute logits (tokens, vocab_size) after each of some tokens that follow a prompt, without changing it."""
        return run_sharded(self.loaded, [prefill.cache], [ids], self.ranks)
