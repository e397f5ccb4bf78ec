"""What one attention call reads for all sequences of a step on a GPU: where their rows lie, as integers on the device.

A unit is one KV head of one sequence. A table is filled when sequences join or leave, and advanced once per step for
all layers. Its sizes are fixed, so that a recorded step can read it for any sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvr_mpi.kv.attention import PartialAttention
from kvr_mpi.kv.pool import PAGE_ROWS, pages_for
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model.attention_hook import AttentionParams

# Columns, for each unit: the row to which its first token would go, if all its rows were adjacent; its number of rows
# (if it grows, minus the sequence's length); whether it grows; whether it has any rows.
BEGINS, FILLED, GROWS, IS_HERE, COLUMNS = 0, 1, 2, 3, 4


class PageTable:
    """The table of all layers.

    slots : largest number of sequences.
    width : largest number of pages of a unit.
    is_complete : whether every unit of every sequence has rows.
    moves : `Pool.moves` when it was filled.
    """

    def __init__(self, sequence: SequenceKV, slots: int, width: int, *, is_complete: bool) -> None:
        self.pool, self.shapes, device = sequence.pool, sequence.shapes, sequence.pool.device
        self.slots, self.width, self.is_complete, self.moves = slots, width, is_complete, -1
        units = [slots * shape.num_kv_heads for shape in self.shapes]
        total = sum(units)
        self._numbers = torch.zeros(total * (COLUMNS + width), dtype=torch.int32, device=device)
        columns, pages = torch.split(self._numbers, [total * COLUMNS, total * width])
        self._columns = columns.view(COLUMNS, total)
        self._pages = torch.split(pages.view(total, width), units)
        self._here = torch.split(self._columns[IS_HERE], units)
        slot = [torch.arange(many, device=device) // max(1, many // slots) for many in units]
        self._slots, self._units = torch.cat(slot), units
        self._edges = [torch.arange(many + 1, dtype=torch.int32, device=device) for many in units]
        self._counts: Sequence[torch.Tensor] = ()
        self._places: Sequence[torch.Tensor] = ()

    @staticmethod
    def sizes_for(sequences: Sequence[SequenceKV]) -> tuple[int, bool]:
        """Return the width that sequences need, and whether all their units have rows."""
        width, is_complete = 1, True
        for sequence in sequences:
            for layer_idx, shape in enumerate(sequence.shapes):
                pages = [0] * shape.num_kv_heads
                for span in sequence.open(layer_idx):
                    for head in range(span.head, span.heads.stop):
                        pages[head] += pages_for(span.keys.shape[1] if span.grows else span.filled)
                width, is_complete = max([width, *pages]), is_complete and all(pages)
                is_complete &= sequence.attends(layer_idx)
        return width, is_complete

    def fill(self, sequences: Sequence[SequenceKV]) -> None:
        """Replace the sequences by others that need no larger sizes; units without rows have a dummy page."""
        self.moves = self.pool.moves
        tables, columns = list[np.ndarray](), list[np.ndarray]()
        for layer_idx, (shape, many) in enumerate(zip(self.shapes, self._units, strict=True)):
            dims = shape.key_dim, shape.value_dim
            dummy = self.pool.dummy_page(dims) if many else 0
            numbers, table = np.zeros((COLUMNS, many), np.int32), np.full((many, self.width), dummy, np.int32)
            numbers[BEGINS], numbers[FILLED] = dummy * PAGE_ROWS - 1, 1
            for slot, sequence in enumerate(sequences):
                if not sequence.attends(layer_idx):
                    continue
                used = np.zeros(shape.num_kv_heads, np.int32)  # pages of each head
                for span in sequence.layers[layer_idx] or ():
                    capacity, filled, heads = span.keys.shape[1], span.filled, np.arange(len(span.keys))
                    units = slot * shape.num_kv_heads + span.head + heads
                    count = pages_for(capacity if span.grows else filled)
                    first = span.block.row + span.at + heads * capacity
                    for unit, at, row in zip(units, used[span.heads], first, strict=True):
                        table[unit, at : at + count] = row // PAGE_ROWS + np.arange(count)
                        table[unit, at + count :] = table[unit, 0]  # padding, which is never read
                    before = used[span.heads] * PAGE_ROWS
                    used[span.heads] += count
                    total = before + filled
                    numbers[FILLED, units], numbers[IS_HERE, units], numbers[GROWS, units] = total, 1, span.grows
                    # Tokens that other ranks keep are written to the dummy page.
                    numbers[BEGINS, units] = first - before if span.grows else dummy * PAGE_ROWS - total
            columns.append(numbers)
            tables.append(table.ravel())
        whole = np.concatenate([np.concatenate(columns, axis=1).ravel(), *tables])
        self._numbers.copy_(torch.from_numpy(whole))

    def advance(self, lengths: torch.Tensor) -> None:
        """Begin a step, given the length of each sequence before it (slots,), int64 on the device."""
        counts = self._columns[FILLED] + self._columns[GROWS] * lengths.index_select(0, self._slots)
        self._places = torch.split(self._columns[BEGINS] + counts, self._units)
        self._counts = torch.split((counts + self._columns[GROWS]).int(), self._units)

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append one token per sequence, keys and values (1, kv_heads, slots, dim)."""
        shape = self.shapes[layer_idx]
        for rows, tokens in zip(self.pool.rows[shape.key_dim, shape.value_dim], (keys, values), strict=True):
            rows.index_copy_(0, self._places[layer_idx], tokens[0].transpose(0, 1).flatten(0, 1))

    def attend(
        self, layer_idx: int, query: torch.Tensor, params: AttentionParams, window: int | None
    ) -> PartialAttention:
        """Attend from one token per sequence (1, heads, slots, head_dim), with one call for all of them."""
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        slots, dim = query.shape[2:]
        shape, edges = self.shapes[layer_idx], self._edges[layer_idx]
        units = query[0].view(shape.num_kv_heads, -1, slots, dim).permute(2, 0, 1, 3).flatten(0, 1)
        rows = self.pool.rows[shape.key_dim, shape.value_dim]
        keys, values = (each.view(-1, PAGE_ROWS, 1, each.shape[1]) for each in rows)
        out, lse = varlen_attn(
            units,
            keys,
            values,
            edges,
            edges,  # required but not read for keys, which pages and counts locate
            1,
            self.width * PAGE_ROWS,
            return_aux=AuxRequest(lse=True),
            scale=params.scale,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            enable_gqa=True,
            seqused_k=self._counts[layer_idx],
            block_table=self._pages[layer_idx],
        )
        lse = lse.t().float()  # varlen_attn returns (group, units)
        if not self.is_complete:
            is_here = self._here[layer_idx].bool().unsqueeze(-1)
            out = torch.where(is_here.unsqueeze(-1), out, 0.0)
            lse = torch.where(is_here, lse, float("-inf"))
        return PartialAttention(
            out.reshape(1, slots, -1, dim).transpose(1, 2), lse.reshape(1, slots, -1).transpose(1, 2)
        )
