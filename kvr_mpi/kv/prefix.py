"""What all prompts begin with: its keys and values are computed once on every rank, and never travel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

# Reads of a layer each KV head's keys and values (tokens, dim); None if the layer keeps none.
ReadHeads = Callable[[int], "Sequence[tuple[torch.Tensor, torch.Tensor]] | None"]
ReadRows = Callable[[int, int, int], "torch.Tensor | None"]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Keys and values of the tokens that prompts begin with.

    Parameters
    ----------
    ids : tuple of int
    layers : sequence of Tensor or None
        For each layer (tokens, elements of K and V of all heads), as buffers hold them; None where there are none.
    states : dict of int to Tensor
        By layer, those of layers that keep states (bytes,), as messages hold them.
    read : callable or None
        Of what is stored: reads of a layer the rows from a token to another, or gives None if it keeps none.
    heads : callable or None
        Of what compression has left: reads a layer's heads, each with tokens of its own; `layers` is empty then.
    compression : str
        And by which method and settings.
    source : hashable, optional
        Where it is stored: two with the same source are the same prefix.
    """

    ids: tuple[int, ...]
    layers: Sequence[torch.Tensor | None]
    states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    read: ReadRows | None = None
    heads: ReadHeads | None = None
    compression: str = ""
    source: Hashable = None

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return len(self.ids)

    @property
    def held_bytes(self) -> int:
        """Memory it takes as long as it is there."""
        return sum(held.nbytes for held in (*self.layers, *self.states.values()) if held is not None)

    def is_same(self, other: SharedPrefix | None) -> bool:
        """Whether another is the same prefix, held or read once more."""
        return other is self or (other is not None and self.source is not None and other.source == self.source)

    def copy_into(self, buffer: torch.Tensor, layer_idx: int) -> None:
        """Fill the first rows of a layer's buffer (capacity, elements)."""
        rows = self.layers[layer_idx]
        if rows is not None:
            buffer[: self.tokens].copy_(rows, non_blocking=True)

    def check(self, ids: Sequence[int]) -> None:
        """Make sure that a prompt begins with it and goes on.

        Raises
        ------
        ValueError
            If it does not: its answer would be that of another prompt.
        """
        if len(ids) <= self.tokens or tuple(ids[: self.tokens]) != self.ids:
            raise ValueError(
                f"a prompt of {len(ids)} tokens does not begin with the shared prefix of {self.tokens} tokens and go on"
            )
