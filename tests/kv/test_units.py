"""A step of decoding by its three backends: documents whose heads hold what they hold, wherever that lies."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from fake_flash import FlashReference

from kvr_mpi.kv import units
from kvr_mpi.kv.arena import Arena, make_rows
from kvr_mpi.kv.head_store import HeadStore
from kvr_mpi.kv.units import PageTable, attend_units, unit_tables, write_token
from kvr_mpi.model import LayerShape
from kvr_mpi.model.attention_hook import AttentionParams
from kvr_mpi.model.masks import Visibility

SHAPE, GROUP, ROOM = LayerShape(3, 8, 8), 2, 3
CPU = torch.device("cpu")


def made(arena: Arena | None, length: int, draws: random.Random, kind: str) -> HeadStore:
    """A document of so many tokens: whole, or of any heads some rows."""
    heads = [0, 1, 2] if kind != "some heads" else sorted(draws.sample(range(3), draws.randint(0, 2)))
    counts = [length if kind == "whole" else draws.randint(1, length) for _ in heads]
    memory = make_rows(SHAPE, counts, ROOM, torch.float32, CPU, arena)
    draw = torch.Generator().manual_seed(length)
    store = HeadStore.by_heads(memory, SHAPE, counts, ROOM, length, heads, is_whole=kind == "whole")
    for at in range(len(heads)):
        for rows in store.own_rows(at, length):
            rows.copy_(torch.randn(rows.shape, generator=draw))
    return store


@pytest.mark.parametrize("pages", [0, 1000])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("kind", "window"), [("whole", None), ("whole", 5), ("ragged", None), ("some heads", None)])
def test_pages_read_what_torch_reads(
    monkeypatch: pytest.MonkeyPatch, pages: int, kind: str, window: int | None, softcap: float | None
) -> None:
    """In one extent or, with one for each document, in several; over pages' edges, in steps that are repeated.

    With a soft cap, which flash attention does not take, they are read where they lie.
    """
    monkeypatch.setattr(units, "takes_flash", lambda query, values, params: params.is_plain)
    seen, params, draw = Visibility(window=window), AttentionParams(0.3, softcap), torch.Generator().manual_seed(0)
    lengths = [255, 1, 700, 256, 30]
    arena = Arena([SHAPE], torch.float32, CPU, extent_bytes=0)
    arena.spare_bytes = pages * arena.page_bytes
    rows = [[made(own, length, random.Random(length), kind) for length in lengths] for own in (arena, None)]
    tables = [unit_tables([stores])[0] for stores in rows]
    assert isinstance(tables[0], PageTable) and (len(tables[0]._extents) > 1) == (pages == 0)
    assert not isinstance(tables[1], PageTable)
    for step in (0, 0, 1, 2):  # the first one failed behind this layer, and is run again
        before = [length + step for length in lengths]
        query = torch.randn(1, 3 * GROUP, len(lengths), 8, generator=draw)
        fresh = torch.randn(2, 1, 3, len(lengths), 8, generator=draw)
        found = []
        for stores, table in zip(rows, tables, strict=True):
            write_token(stores, table, fresh[0], fresh[1], before, torch.tensor(before))
            with FlashReference():
                found.append(attend_units(query, stores, table, [count + 1 for count in before], params, seen))
        torch.testing.assert_close(found[0].out, found[1].out)
        torch.testing.assert_close(found[0].lse, found[1].lse)
        assert bool(found[0].lse.isneginf().any()) == (kind == "some heads")


def test_layers_with_other_heads_have_extents_of_their_own() -> None:
    wide = replace(SHAPE, key_dim=16, value_dim=16)
    arena = Arena([SHAPE, wide], torch.float32, CPU, extent_bytes=0)
    taken = [arena.take(shape, 1) for shape in (SHAPE, wide, SHAPE)]
    assert taken[0].extent is taken[2].extent is not taken[1].extent
    assert [each.keys.shape for each in taken] == [(256, 8), (256, 16), (256, 8)]
