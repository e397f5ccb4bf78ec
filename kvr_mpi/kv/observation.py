"""The queries of a prompt's observation window, kept during the prefill: compression scores keys with them.

Only the rank with the last slice keeps them: it ends with all keys, and the window lies in its slice (SnapKV, Li et al.
2024, section 4: the last tokens of a prompt show what its answer will attend to).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvr_mpi.kv.route import Range
from kvr_mpi.model.attention_hook import AttentionParams


@dataclass(frozen=True, slots=True)
class WindowQueries:
    """One layer's queries of the window (1, heads, window, head_dim), and its attention parameters."""

    query: torch.Tensor
    params: AttentionParams


# Takes a layer and its window queries; returns the positions that each KV head keeps, (tokens,) int64, ascending, or
# None if the layer keeps everything.
Retain = Callable[[Any, "WindowQueries | None"], "Sequence[torch.Tensor] | None"]


@dataclass(frozen=True, slots=True)
class Observation:
    """Queries of the tokens of a window, by layer.

    window : positions of its tokens.
    """

    window: Range
    layers: dict[int, WindowQueries] = field(default_factory=dict)

    def keep(self, layer_idx: int, query: torch.Tensor, ranges: Sequence[Range], params: AttentionParams) -> None:
        """Append a layer's queries of window tokens to those kept from earlier chunks.

        Parameters
        ----------
        query : torch.Tensor
            Of tokens computed together (1, heads, tokens, head_dim); a single token's heads may be folded.
        ranges : sequence of (int, int)
            The tokens' ranges: all that this rank computes, or a chunk of them. The window lies in the last range
            (`check_in`).
        """
        computed = sum(last - first for first, last in ranges)
        first, last = max(ranges[-1][0], self.window[0]), min(ranges[-1][1], self.window[1])
        if first >= last:
            return
        whole = query.reshape(1, -1, computed, query.shape[-1])
        at = computed - (ranges[-1][1] - first)
        rows = whole[:, :, at : at + last - first].clone()
        if first > self.window[0]:
            rows = torch.cat([self.layers[layer_idx].query, rows], dim=2)
        self.layers[layer_idx] = WindowQueries(rows, params)

    def check_in(self, owned: Sequence[Range]) -> None:
        """Check that the whole window lies in the last range that this rank computes.

        Raises
        ------
        ValueError
            If it does not: what compression keeps would depend on the partition.
        """
        (first, last), (start, stop) = owned[-1], self.window
        if not first <= start < stop <= last:
            raise ValueError(
                f"the observation window, tokens {start} to {stop}, is not in the last slice, tokens {first} to {last}"
            )
