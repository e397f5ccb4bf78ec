"""Whole lines with time and rank, each written in one piece, whatever the text."""

from __future__ import annotations

import io
import re
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_reports import STAMP, TEXT

from kvr_mpi.report.log import Log


class RecordedStream(io.StringIO):
    """A stream that remembers in which pieces it was written, and when it was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []
        self.unflushed = 0

    def write(self, text: str) -> int:
        self.writes.append(text)
        self.unflushed += 1
        return super().write(text)

    def flush(self) -> None:
        self.unflushed = 0
        super().flush()


def test_rank_0_needs_no_naming() -> None:
    stream = io.StringIO()
    Log(0, 4, stream).line("model loaded")
    assert re.fullmatch(STAMP + r"\] model loaded\n", stream.getvalue())


@pytest.mark.parametrize("rank", [1, 3, 127])
def test_other_ranks_name_themselves_and_their_host(rank: int) -> None:
    stream = io.StringIO()
    Log(rank, stream=stream).line("model loaded")
    assert re.fullmatch(rf"{STAMP} rank {rank} {re.escape(socket.gethostname())}\] model loaded\n", stream.getvalue())


def test_root_lines_come_from_rank_0_only() -> None:
    streams = [io.StringIO() for _ in range(3)]
    for rank, stream in enumerate(streams):
        Log(rank, stream=stream).root("8 documents")
    assert [stream.getvalue().count("8 documents") for stream in streams] == [1, 0, 0]


@settings(max_examples=100)
@given(text=TEXT, rank=st.integers(0, 3))
def test_every_line_is_whole_prefixed_and_written_in_one_piece(text: str, rank: int) -> None:
    stream = RecordedStream()
    Log(rank, stream=stream).line(text)
    prefix = re.compile(STAMP + (rf" rank {rank} \S+" if rank else "") + r"\] ")
    assert stream.writes and stream.unflushed == 0
    for piece in stream.writes:
        assert prefix.match(piece) and piece.endswith("\n") and piece.count("\n") == 1 and "\r" not in piece
    assert [prefix.sub("", piece, count=1)[:-1] for piece in stream.writes] == (text.splitlines() or [""])


def test_the_log_is_standard_error_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    Log().line("words")
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("] words\n")
