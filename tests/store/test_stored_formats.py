"""One format: what earlier versions wrote is read, and every command reads the same record."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import exported, record, write

from kvr_mpi.job import JobSpec
from kvr_mpi.runtime.stored_source import scan_stored
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run, merge_runs, prune_kv

pytestmark = pytest.mark.quick
IDS = tuple(range(100, 115))
KEYS = torch.arange(15 * 4 * 2, dtype=torch.float32).reshape(15, 4, 2)


@pytest.mark.parametrize("name", ["schema_5", "schema_5-merged"])
@pytest.mark.parametrize("then", ["read", "merge", "prune"])
def test_files_of_version_5_are_read_merged_and_pruned(tmp_path: Path, name: str, then: str) -> None:
    """A document of two groups of two ranks, a compressed one, one in bfloat16, one without tokens, and an error."""
    with tarfile.open(Path(__file__).with_name("schema_5.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    path = tmp_path / name
    if then == "merge":
        path, _ = tmp_path / "all.h5", merge_runs([path], tmp_path / "all.h5")
    elif then == "prune":
        prune_kv(path, 2, ["unknown tokens"])
    results = open_results(path)
    assert results.ids() == ["bad", "compressed", "dir/spread", "half", "unknown tokens"]
    assert results["bad"].error == "it is not UTF-8" and results["half"].answer == "Zwei Sätze.\n"
    assert results["dir/spread"].logprobs == (-0.5, -1.0, -2.0, -0.25)
    with results.open("dir/spread") as (_, kv):
        assert kv.tokens is not None and (kv.tokens.ids, kv.tokens.text, kv.layers) == (IDS, (1, 9), (0, 2))
        keys, values = kv.read(2, 3, 12, (1, 3))
        assert torch.equal(keys, KEYS[3:12, 1:3]) and torch.equal(values, -KEYS[3:12, 1:3])
    with results.open("compressed") as (_, kv):
        kept = kv.kept(0)
        assert kv.compression == "snapkv: budget 4" and kv.kept(2) is None
        assert kept is not None and [own.tolist() for own in kept] == [[0, 4, 14], [1, 2, 3, 8, 14]]
        assert torch.equal(kv.read(0)[0], KEYS[:8, :1]) and torch.equal(kv.read(2)[1], -KEYS[:, :2])
    keys, values = results.kv("half").layers[0]
    assert torch.equal(keys, KEYS.bfloat16()[..., :1]) and torch.equal(values, KEYS.bfloat16())
    with results.open("unknown tokens") as (_, kv):
        assert kv.tokens is None and (kv.layers == (0,)) == (then != "prune")


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
