"""Documents come one by one, none of them fills the memory, and no file stops the others."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_corpora import read

from kvr_mpi.documents import SUFFIXES, Document, read_corpus, scan_corpus


@settings(max_examples=60)
@given(raw=st.binary(max_size=200), suffix=st.sampled_from(SUFFIXES))
def test_no_file_stops_the_others(tmp_path_factory: pytest.TempPathFactory, raw: bytes, suffix: str) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / f"a{suffix}").write_bytes(raw)
    (folder / "z.txt").write_text("sound")
    assert read(folder)[-1] == Document("z.txt", "sound")


def test_documents_come_one_by_one(tmp_path: Path) -> None:
    # A corpus may be larger than memory: what comes later is not looked at before it is asked for.
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text("second")
    stream = read_corpus([str(tmp_path)])
    assert next(stream) == Document("a.txt", "first")
    (tmp_path / "b.txt").write_text("changed")
    assert next(stream) == Document("b.txt", "changed")
    assert next(stream, None) is None


def test_what_no_model_could_read_is_an_error_and_never_in_memory(tmp_path: Path) -> None:
    spaces = gzip.compress(b" " * (48 << 20))
    bomb = gzip.compress(b'{"id": "a", "text": "') + 8 * spaces + gzip.compress(b'"}\n{"id": "b", "text": "short"}\n')
    (tmp_path / "rows.jsonl.gz").write_bytes(bomb)
    with (tmp_path / "large.txt").open("wb") as stream:
        stream.truncate(3 << 30)
    tracemalloc.start()
    try:
        corpus = scan_corpus([str(tmp_path)])
        found = [corpus.read(number) for number in range(len(corpus))]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(one.id, one.text) for one in found] == [("large.txt", ""), ("rows.jsonl.gz:1", ""), ("b", "short")]
    assert "larger than 64 MiB" in str(found[0].error)
    assert f"line 1 of {tmp_path}/rows.jsonl.gz has {8 * (48 << 20) + 24} bytes" in str(found[1].error)
    assert peak_bytes < 300 << 20
