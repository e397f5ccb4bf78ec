"""What every placement of heads keeps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvr_mpi.compress.placement import LayerPlacement


def check(found: LayerPlacement, loads: Sequence[float], copies: int) -> None:
    """Every head is somewhere, whole, on a rank at most once; copies are within bounds."""
    for head, load in enumerate(loads):
        pieces = [piece for piece in found.pieces if piece.head == head]
        assert pieces and sum(piece.load for piece in pieces) == pytest.approx(load, abs=1e-6 * (1 + sum(loads)))
        assert len({piece.rank for piece in pieces}) == len(pieces)
    assert all(0 <= piece.rank < found.ranks for piece in found.pieces)
    assert 0 <= found.copies <= copies
    assert found.heaviest >= sum(loads) / found.ranks * (1 - 1e-6)
