"""Scores of a text's tokens by the attention paid to them when the model repeats the text.

KVzip (Kim et al. 2025, arXiv:2505.23416, section 3): after the prefill, the text's tokens run through the model again,
as if it were asked to repeat the text. A token's score is the highest weight that any of these queries gives it, over
the query heads of its KV head. No question takes part, so what is kept suits all that may come later.

The repeated tokens attend to the prompt up to the end of the text, and to each other; nothing of them is kept. They run
in chunks, each of which scores its own tokens of the text. The paper's code takes the softmax over a part of the keys;
here it is over all, since attention has its denominators anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import torch

from kvr_mpi.compress.scores import query_products
from kvr_mpi.errors import DocumentError
from kvr_mpi.kv.attention import attend, attend_range
from kvr_mpi.kv.layer import RowCache, RowLayer
from kvr_mpi.kv.relay import Range
from kvr_mpi.kv.sequence import Pair, SequenceKV
from kvr_mpi.model.attention_hook import AttentionParams, run_model
from kvr_mpi.model.layer_chunks import UnreadError

# What the model is asked after the text.
INSTRUCTION = "\n\nRepeat the previous context exactly."
# Tokens of the text that are scored in one forward pass, and those before them that show where to continue.
CHUNK_TOKENS, LINK_TOKENS = 2048, 8
# Fewest tokens of a chunk, where the model's context leaves little room after the text.
LEAST_CHUNK = 64


class RepeatRow(RowCache):
    """The cache that a model sees for tokens after a prompt's text, of which nothing is kept.

    sequence : the prompt's keys and values.
    stop : end of the text; the new tokens follow it.
    scored : the range of tokens to score.
    layers : those whose keys are scored; the model is left after the last one.
    scores : of these layers (kv_heads, scored tokens), float32.
    """

    prefilling = True

    def __init__(self, sequence: SequenceKV, stop: int, scored: Range, layers: Collection[int]) -> None:
        self.sequence, self.length, self._scored, self._layers = sequence, stop, scored, layers
        self.scores: dict[int, torch.Tensor] = {}
        super().__init__([RowLayer(self, idx, shape) for idx, shape in enumerate(sequence.shapes)])

    def whole_lengths(self, tokens: int) -> list[tuple[int, int]]:
        """Return the tokens and the prompt's own length, with which its keys were embedded."""
        return [(tokens, self.sequence.length)]

    def append(self, layer: RowLayer, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Return the new tokens' keys and values, which are not kept."""
        return keys, values

    def attend(
        self, layer: RowLayer, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend to the prompt up to the end of its text, and to the new tokens; score what the layer is asked for.

        Raises `UnreadError` in the last layer that is scored.
        """
        at, stop, seen, sequence = layer.layer_idx, self.length, layer.shape.visibility, self.sequence
        whole = stop + query.shape[2]

        def rows(first: int, last: int) -> Pair:
            own = slice(max(first, stop) - stop, max(last, stop) - stop)
            before = sequence.pieces(at, first, min(last, stop)) if first < stop else []
            pieces = [*before, (keys[:, :, own], values[:, :, own])]
            return torch.cat([one for one, _ in pieces], 2), torch.cat([one for _, one in pieces], 2)

        if seen.sees_all(whole):
            part = attend(query, keys, values, params, causal=True)
            for piece in sequence.pieces(at, 0, stop):
                part = part.merge(attend(query, *piece, params))
        else:
            part = attend_range(query, (stop, whole), rows, seen, params)
        if at in self._layers:
            scored, _ = sequence.rows(at, *self._scored)
            self.scores[at] = peak_weights(query, scored, part.lse, params)
            if len(self.scores) == len(self._layers):
                raise UnreadError
        return part.finish(params).to(query.dtype)


def peak_weights(query: torch.Tensor, keys: torch.Tensor, lse: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """Return the highest weight of each key over all queries and the query heads of its KV head (kv_heads, keys).

    query : (1, heads, queries, head_dim), heads a multiple of kv_heads; all of them see these keys.
    keys : (1, kv_heads, keys, head_dim).
    lse : log-sum-exp over all keys that each query sees, without sinks (1, heads, queries).
    """
    kv_heads = keys.shape[1]
    if params.sinks is not None:
        lse = torch.logaddexp(lse, params.sinks.float().view(1, -1, 1))
    by_group = query[0].reshape(kv_heads, -1, *query.shape[2:]), lse[0].reshape(kv_heads, -1, lse.shape[2])
    found = []
    for group, totals, own in zip(*by_group, keys[0], strict=True):
        peaks = [
            (query_products(one, own, params) - total.unsqueeze(-1)).amax(0)  # one head at a time: they are large
            for one, total in zip(group, totals, strict=True)
        ]
        found.append(torch.stack(peaks).amax(0))
    return torch.stack(found).exp()


def chunk_tokens(longest: int | None, stop: int, instruction: int) -> int:
    """Return how many tokens of a text can be repeated at once after a prompt that ends with the text at `stop`.

    longest : the model's context; None: without a limit.
    instruction : tokens of the instruction.

    Raises `DocumentError` if the context leaves too little room.
    """
    room = CHUNK_TOKENS if longest is None else longest - stop - instruction - LINK_TOKENS
    if room < LEAST_CHUNK:
        raise DocumentError(
            f"compress.method = 'kvzip' repeats a text after its {stop} tokens, {LEAST_CHUNK} or more at a time, but "
            f"the model's context has {longest} tokens; set prompt.max_tokens to at most "
            f"{(longest or 0) - instruction - LINK_TOKENS - LEAST_CHUNK}, or choose another method"
        )
    return min(CHUNK_TOKENS, room)


@torch.inference_mode()
def repeat_scores(
    sequence: SequenceKV, ids: Sequence[int], text: Range, instruction: Sequence[int], layers: Collection[int]
) -> torch.Tensor:
    """Score the tokens of a text by having the model repeat it (layers, kv_heads, tokens), float32.

    sequence : the whole prompt, of which this rank holds all tokens, none dropped.
    ids : the prompt.
    text : range of its tokens that are scored.
    instruction : tokens after the text, which ask for it.
    """
    loaded, (start, stop) = sequence.loaded, text
    size, found = chunk_tokens(loaded.shape.max_tokens, stop, len(instruction)), list[torch.Tensor]()
    for first in range(start, stop, size):
        scored = first, min(stop, first + size)
        tokens = [*instruction, *ids[max(start, first - LINK_TOKENS) : scored[1]]]
        row = RepeatRow(sequence, stop, scored, layers)
        with contextlib.suppress(UnreadError):
            run_model(loaded.model, torch.tensor([tokens], device=loaded.device), row)
        found.append(torch.stack([row.scores[idx] for idx in sorted(layers)]))
    return torch.cat(found, -1)
