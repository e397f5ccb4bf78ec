"""The generic way: a layer gives the model all keys and values up to its slice, and the model's own attention attends.

For attention that cannot be taken over in parts: models with attention code of their own, ALiBi, custom masks, latent
attention, keys shared between layers. The model sees what it would see going on from a cache, with the mask it makes
for that, so this is exact wherever transformers goes on from a cache exactly. It is slower: a rank waits for the whole
prefix of a layer before it attends, and masks of slice x prefix are made. Latent attention hands on the latents.
"""

from __future__ import annotations

from typing import Any

import torch

from kvr_mpi.kv.layer import SliceLayer


class WholeLayer(SliceLayer):
    """One layer's keys and values on one rank, for the model's own attention."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens (1, kv_heads, tokens, head_dim), and return all up to them, once they are here."""
        super().update(key_states, value_states, *args, **kwargs)
        self.attended = True
        if self.segments is not None:
            self.segments.collect()
        return self.rows(0, self.length)
