"""Ranks that have fewer cores than they need."""

from __future__ import annotations

import pytest

from kvr_mpi.runtime.prepare import describe_few_cores


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([("a", [0, 1])] * 2, None),
        ([("a", [0, 1])] * 3, "3 ranks on a may use only 2 cores"),
        ([("a", [0]), ("a", [1]), ("b", [0])], None),  # each bound to its own
        ([("a", [0]), ("b", [3]), ("b", [3])], "2 ranks on b may use only 1 core,"),
        ([("a", [])] * 9, None),  # not known on this system
    ],
)
def test_more_ranks_than_cores_are_named(ranks: list[tuple[str, list[int]]], words: str | None) -> None:
    found = describe_few_cores(ranks)
    assert bool(found) == (words is not None) and (words or "") in "".join(found)
