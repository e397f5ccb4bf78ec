"""Whole lines with time and rank, each written in one piece, whatever the text."""

from __future__ import annotations

import io
import re
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_reports import STAMP, TEXT

from kvr_mpi.report.log import Detail, Level, Log


class RecordedStream(io.StringIO):
    """A stream that remembers in which pieces it was written."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


@settings(max_examples=100)
@given(text=TEXT, rank=st.integers(0, 3))
def test_every_line_is_whole_prefixed_and_written_in_one_piece(text: str, rank: int) -> None:
    stream = RecordedStream()
    Log(rank, stream=stream).line(text)
    who = rf" rank {rank} {re.escape(socket.gethostname())}" if rank else ""
    prefix = re.compile(STAMP + who + r"\] ")
    assert stream.pieces
    for piece in stream.pieces:
        assert prefix.match(piece) and piece.endswith("\n") and piece.count("\n") == 1 and "\r" not in piece
    assert [prefix.sub("", piece, count=1)[:-1] for piece in stream.pieces] == (text.splitlines() or [""])


LINES = ["words", Detail("more"), "warning: slow", "1/2 a: error: empty", "exit code 0: done"]


@pytest.mark.parametrize(("level", "shown"), [("quiet", (2, 3, 4)), ("normal", (0, 2, 3, 4)), ("verbose", range(5))])
def test_what_is_shown(level: Level, shown: range, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        for line in LINES:
            Log(rank, level).root(line)
    out, err = capsys.readouterr()
    assert out == "" and [row.partition("] ")[2] for row in err.splitlines()] == [LINES[number] for number in shown]
