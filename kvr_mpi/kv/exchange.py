"""What the cache asks of a strategy: where this rank's keys and values go, where those of others come from.

The strategies themselves are in ``prefill``, a file each (``relay``, ``all_gather``, ``ring``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from kvr_mpi.kv.attention import PartialAttention
from kvr_mpi.kv.transfers import LayerTransfers, Range
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.masks import Visibility
from kvr_mpi.partition import Partition


class SegmentedLayer(Protocol):
    """A layer's keys and values as a strategy sees them."""

    segments: LayerTransfers | None  # on their way; None on a rank alone
    fresh_ranges: Sequence[Range]  # the tokens that attend

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a range of tokens, each (1, kv_heads, tokens, head_dim)."""


class Exchange(Protocol):
    """One strategy on one rank.

    Ranks are numbered in the order of the prompt's slices, which need not be that of the chain.
    """

    rank: int
    partition: Partition  # of the prompt
    owned: list[Range]  # the tokens this rank computes
    decode_rank: int  # the rank that ends with all keys and values, and the last token
    capacity: int  # tokens a layer's buffer holds
    in_order: bool  # whether each rank goes on where the one before has ended
    forwards: bool  # whether this rank passes segments on
    saves_last_layer: bool  # whether what nobody reads of the last layer is left out
    segments: int  # messages of keys and values of a layer, over all ranks
    takes_chunks: bool  # whether a rank can compute and send its tokens in chunks
    chunks: list[list[Range]]  # its tokens that it computes together; one of all where it takes none
    slots: int  # segments a rank without buffers has to have room for, so that no rank waits for ever (``failure``)

    def post(self, layer: LayerTransfers) -> None:
        """Announce the layer's sends and post its receives, before it computes."""

    def share(self, layer: LayerTransfers, ranges: Sequence[Range]) -> None:
        """Send what is in the buffer now of this rank's own tokens: those of some of its chunks, or all."""

    def attend(
        self,
        layer: SegmentedLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        params: AttentionParams,
    ) -> PartialAttention:
        """Attend from the owned tokens to all tokens up to each."""

    def longest_segment(self) -> int:
        """Tokens of the longest segment that this rank sends or receives."""

    def first_held(self, visibility: Visibility) -> int:
        """Position of the first token from which on this rank has all keys and values of such a layer."""


class MakeExchange(Protocol):
    """How a strategy is made for the rank at one place of a prompt's slices."""

    def __call__(
        self,
        partition: Partition,
        rank: int,
        prefix_tokens: int = 0,
        *,
        sends_all: bool = False,
        chunk_tokens: int | None = None,
    ) -> Exchange:
        """Make it.

        Parameters
        ----------
        prefix_tokens : int
            The first tokens, which every rank has already; they are within the first slice.
        sends_all : bool
            Send all tokens of layers with a window or chunks, too.
        chunk_tokens : int or None
            Ranks compute and send their tokens in chunks, which end at multiples of this; where an exchange takes none
            that is refused before (`prefill.one_prompt`).
        """
