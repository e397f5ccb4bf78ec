"""Decoding over sharded keys and values: each rank of a chain attends to its own tokens.

Every rank runs the model on the last tokens, attends to the tokens that it keeps, and ends with the same logits
(`prefill.packed.Gathering`). A prompt's home is the rank that keeps its last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvr_mpi.decode.batch import MAX_SEQUENCES
from kvr_mpi.decode.group import BatchEntry, Group
from kvr_mpi.kv.row import Row
from kvr_mpi.model import LoadedModel
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.packed import Gathering
from kvr_mpi.transport import Transport


class TokenGroup(Group):
    """The ranks of a chain, each with a shard of every prompt.

    ranks : the chain.
    """

    ranks: Transport

    def __init__(self, loaded: LoadedModel, ranks: Transport) -> None:
        super().__init__(loaded, ranks)
        self._gathering = Gathering(loaded, ranks)

    def is_home(self, prefill: Prefill) -> bool:
        return self.ranks.rank == prefill.last

    def rows(self, documents: Sequence[BatchEntry], most: int | None) -> list[list[BatchEntry]]:
        """Divide prompts into rows, with those about the same document next to each other, so that it is read once."""
        most = min(most or MAX_SEQUENCES, MAX_SEQUENCES)
        return [list(documents[at : at + most]) for at in range(0, len(documents), most)]

    @property
    def why_no_drafts(self) -> str | None:
        return "the ranks of a chain that share keys and values have to run the same tokens"

    def run(self, documents: Sequence[BatchEntry], drafts: Sequence[Sequence[int]] = ()) -> torch.Tensor:
        """Run the model on all ranks; return logits (prompts, vocab_size), the same on all of them."""
        row = self._row_of(documents, self._gathering)
        logits = self._gathering.run(row, [each.last_token for each in documents])
        row.advance()
        return logits

    def look_ahead(self, prefill: Prefill, ids: Sequence[int]) -> torch.Tensor:
        """Compute logits (tokens, vocab_size) after each of some tokens that follow a prompt, without changing it."""
        return self._gathering.run(Row([prefill.cache], [len(ids)], merge=self._gathering), ids)
