"""Where records are, as columns: the record that counts of each document, for little memory."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from made_corpora import write_lines
from made_runs import HEADER, corpus_of, record, take, write

from kvr_mpi.job import make_job
from kvr_mpi.logs import RankLogger
from kvr_mpi.runtime.indexing import index_job
from kvr_mpi.store import kv_writer, places, results
from kvr_mpi.store.folder import survey
from kvr_mpi.store.kv import Piece
from kvr_mpi.store.lock import Lock, this_process
from kvr_mpi.store.log import seal
from kvr_mpi.store.places import Place, Records
from kvr_mpi.store.record import record_values
from kvr_mpi.store.results import Results, read_results
from kvr_mpi.store.rewrite import finish_run
from kvr_mpi.store.run import open_run
from kvr_mpi.transport.local import LocalTransport

CACHE_BYTES = 1_300_000  # of pydantic: 16,384 short strings
NAMES = [*"abcdef", "é", "ab", "abcdefgh", "abcdefghi", "x" * 300, "\U0001f600", "\uffff"]


@pytest.mark.parametrize("bits", [64, 2])
@pytest.mark.parametrize("seed", range(20))
def test_the_last_complete_record_counts_else_the_last_error(
    bits: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of records and of lines that invalidate them, and even if ids have the same hash."""
    real, chance = places.xxhash.xxh3_64_intdigest, random.Random(seed)

    def poor_hash(data: bytes, seed: int = 0) -> int:
        return real(data, seed) % (1 << (bits if seed < 3 else 64))

    monkeypatch.setattr(places.xxhash, "xxh3_64_intdigest", poor_hash)
    there = {f"p{n}": Piece(f"p{n}", "f", n, "") for n in range(8)}
    records, model = Records(), dict[str, list[Place]]()
    for number in range(60):
        name = chance.choice(NAMES)
        if bits == 64 and chance.random() < 0.1:
            only_kv = chance.random() < 0.5
            records.invalidate([name], only_kv=only_kv)
            model[name] = [replace(one, needs=()) for one in model.get(name, [])] if only_kv else []
            continue
        needs = tuple(f"p{chance.randrange(10)}" for _ in range(chance.randrange(3)))
        is_done = chance.random() < 0.6
        place = Place(Path(f"log-{number // 20}"), number, 1, is_done, "" if is_done else "bad", number, "", needs)
        records.add(name, place)
        model.setdefault(name, []).append(place)
    found, lost = records.choose(there)
    wanted = dict[str, Place]()
    for name, some in model.items():
        complete = [one for one in some if one.is_done and all(piece in there for piece in one.needs)]
        for one in complete[-1:] or [one for one in some if not one.is_done][-1:]:
            needs = one.needs if one.is_done else ()
            wanted[name] = replace(one, needs=needs, pieces=tuple(there[piece] for piece in needs))
    assert dict(found) == wanted and [*found.ordered()] == sorted(wanted)
    assert lost.keys() == {name for name, some in model.items() if some} - wanted.keys()
    assert all(name not in found for name in ["nobody", *lost])


@pytest.mark.slow
def test_a_million_answers_need_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a job begins again, and at its end; here of 5,000."""
    count, folder = 5_000, tmp_path / "out"
    for module, name in ((results, "READ_BYTES"), (kv_writer, "LINES_BYTES"), (places, "BLOCK")):
        monkeypatch.setattr(module, name, 1 << 12)  # buffers, whatever the number of answers
    names = [f"document-{n:07d}" for n in range(count)]
    file = write_lines(tmp_path / "a.jsonl", *({"id": name, "text": f"text of {name}"} for name in names))
    take(folder, corpus=corpus_of([])).lock.release()
    write(folder, 0, [record(names[0])])
    (log,) = folder.glob("log-*.jsonl")
    with log.open("ab") as stream:
        stream.writelines(seal(record_values(record(name), ())) for name in names[1:])
    del names
    raw = {"model": {"path": "-"}, "documents": {"path": str(file)}, "output": {"path": str(folder)}}
    spec, corpus = make_job(raw, file)[0], corpus_of([])
    lock, peaks = Lock(folder, this_process()), list[float]()

    def index() -> None:
        nonlocal corpus
        corpus = index_job(spec, LocalTransport(), RankLogger(), folder, is_new=False)
        assert len(corpus.index.digested) == count

    def conclude() -> None:
        finish_run(folder)
        found = Results.of(survey(folder))
        assert all(name in found for name in corpus.ids()) and found.summary().done == count

    for act in (index, lambda: open_run(folder, HEADER, corpus, lock), conclude):
        tracemalloc.start()
        try:
            found = act()
            peaks.append((tracemalloc.get_traced_memory()[1] - CACHE_BYTES) / count)
        finally:
            tracemalloc.stop()
        assert found is None or (found.done, len(found.todo)) == (count, 0)
    lock.release()
    assert (folder / "results.h5").exists()
    assert max(peaks) < 150, f"bytes for each document: {peaks}"


def test_runs_that_are_read_together_need_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their records are columns, too; here of two times 2,500."""
    monkeypatch.setattr(places, "BLOCK", 1 << 12)
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        take(folder, corpus=corpus_of([])).lock.release()
        write(folder, 0, [record(f"{folder.name}-{n:07d}") for n in range(2_500)])
    tracemalloc.start()
    try:
        found = read_results(folders)
        peak = (tracemalloc.get_traced_memory()[1] - CACHE_BYTES) / 5_000
    finally:
        tracemalloc.stop()
    assert len(found) == len(found.ids("done")) == 5_000 and "b-0002499" in found
    assert peak < 100, f"{peak} bytes for each document"
