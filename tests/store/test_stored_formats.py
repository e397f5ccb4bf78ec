"""One format: every command reads and writes the same record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import exported, record, write

from kvr_mpi.job import JobSpec
from kvr_mpi.runtime.stored_source import scan_stored
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run, merge_runs, prune_kv

pytestmark = pytest.mark.quick


def test_every_command_reads_and_writes_the_same_records(tmp_path: Path) -> None:
    """Merge, prune and export keep every field; the questions of kvr ask are about the same documents."""
    wanted = [
        replace(record("a", answer="one\ntwo"), slices=(0, 4), logprobs=(-0.5, -1.0), dropped_tokens=3),
        replace(record("b"), question="which?", samples='[{"answer": "x"}]', columns='{"k": [1, null]}'),
        record("c", "error"),
    ]
    run, one_file = tmp_path / "run", tmp_path / "all.h5"
    run.mkdir()
    write(run, 0, [wanted[0], wanted[2]], kv=True)
    write(run, 1, [wanted[1]], kv=True)

    def check(path: Path) -> None:
        assert list(open_results(path)) == wanted
        rows = [json.loads(line) for line in exported(path, "jsonl").splitlines()]
        assert rows == [json.loads(json.dumps(each.as_json())) for each in wanted]

    def asked(path: Path) -> dict[str, Any]:
        words: dict[str, Any] = {"model": {"path": "m"}, "documents": {"path": [str(path)]}, "output": {"path": "out"}}
        corpus, _ = scan_stored(JobSpec.model_validate(words | {"questions": {"ask": {"q": "Why?"}}}))
        return {corpus.id(number): corpus.digest(number) for number in range(len(corpus))}

    check(run)
    documents = {f"{each.id}#q": each.document_sha256 for each in wanted if each.status == "done"}
    assert asked(run).keys() == documents.keys()
    merge_runs([run], one_file)
    check(one_file)
    assert asked(one_file) == asked(run)
    prune_kv(run, 3, ["b"])
    check(run)
    merge_run(run)
    check(run)
    assert open_results(run).places["a"].kv_bytes and not open_results(run).places["b"].kv_bytes
    assert isinstance(open_results(one_file)["b"], Record)
