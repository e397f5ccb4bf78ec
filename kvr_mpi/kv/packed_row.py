"""Several short prompts in one row of tokens: the model reads its weights once for all of them.

A packed row (1, tokens) holds the tokens of each prompt, one prompt after the other, each with its own positions. A
`PackedCache` splits every layer's keys and values by prompt and passes them to each prompt's own `SliceCache`, which
attends as if it were alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kvr_mpi.kv.attention import PartialAttention, takes_flash
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.row import RowCache, RowLayer
from kvr_mpi.model.attention_hook import AttentionParams


class PackedCache(RowCache):
    """The caches of several prompts as one cache.

    documents : one for each prompt, of a rank that prefills it alone.
    tokens : tokens of each prompt in the row.
    """

    prefilling = True

    def __init__(self, documents: Sequence[SliceCache], tokens: Sequence[int]) -> None:
        self.documents = documents
        stops = list(itertools.accumulate(tokens, initial=0))
        self.bounds = list(itertools.pairwise(stops))
        self.edges = torch.tensor(stops, dtype=torch.int32, device=documents[0].device)
        self.longest = max(tokens)
        super().__init__([RowLayer(self, at, layer.shape) for at, layer in enumerate(documents[0].layers)])

    def append(self, layer: RowLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append each prompt's tokens to its own buffer."""
        for document, (first, last) in zip(self.documents, self.bounds, strict=True):
            document.layers[layer.layer_idx].update(keys[:, :, first:last], values[:, :, first:last])

    def attend(
        self, layer: RowLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend from each prompt's tokens to those before them."""
        own = [document.layers[layer.layer_idx] for document in self.documents]
        seen = layer.shape.visibility
        is_plain = all(document.prefix is None for document in self.documents) and seen.chunk is None
        if is_plain and takes_flash(query, values, params):
            from torch.nn.attention.varlen import AuxRequest, varlen_attn

            for document in self.documents:
                document.current = None
            out, lse = varlen_attn(
                query[0].transpose(0, 1),
                keys[0].transpose(0, 1),
                values[0].transpose(0, 1),
                self.edges,
                self.edges,
                self.longest,
                self.longest,
                return_aux=AuxRequest(lse=True),
                scale=params.scale,
                window_size=(-1 if seen.window is None else seen.window - 1, 0),
                enable_gqa=True,
            )
            # The log-sum-exp is (heads, queries); varlen_attn's own documentation is wrong.
            part = PartialAttention(out.transpose(0, 1).unsqueeze(0), lse.view(1, *query.shape[1:3]).float())
            return part.finish(params).to(query.dtype)
        outs = [
            one.attend(query[:, :, first:last], keys[:, :, first:last], values[:, :, first:last], params)
            for one, (first, last) in zip(own, self.bounds, strict=True)
        ]
        return torch.cat(outs, dim=2)

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """For each prompt, its tokens in the row and its length with them."""
        rows = zip(self.documents, self.bounds, strict=True)
        return [(last - first, document.prompt_tokens) for document, (first, last) in rows]
