"""What ranks say of themselves while a whole job runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvr_mpi.store.states import StateWriter
from kvr_mpi.store.status import read_status

SMALL_VOCABULARY = True


def test_every_rank_says_what_it_is_at(
    job: Path, tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: set[tuple[int, str]] = set()
    seen: list[tuple[int, ...]] = []
    tell = StateWriter.tell

    def spied(self: StateWriter, doing: str, what: str = "") -> None:
        tell(self, doing, what)
        told.add((self._state.rank, doing))
        if doing == "decoding":
            assert "answer" in what
            seen.append(tuple(state.rank for state in read_status(tmp_path / "out").ranks))

    monkeypatch.setattr(StateWriter, "tell", spied)
    done = run_here(2, [job])
    assert done.returncode == 0, done.stderr
    words = ("prefilling", "decoding", "waiting", "ended")
    assert told == {(rank, word) for rank in range(2) for word in words} | {(0, "reading")}, "only the leader reads"
    assert (0, 1) in seen, "both can be seen from outside while it runs"
    assert not (tmp_path / "out" / "states").exists(), "nothing is left of it"
