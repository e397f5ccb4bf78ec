"""Keys and values as safetensors: the same bits and records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from made_runs import HEADER, corpus_of, record, stored_layers, take, write
from safetensors import safe_open

from kvr_mpi.errors import EXIT_CONFIG, EXIT_OK
from kvr_mpi.store.results import open_results
from kvr_mpi.store.tensors import tensors_file
from kvr_mpi.store.volumes import key_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    names = ("a", "dir/b c", "é" * 200)
    take(folder, corpus=corpus_of((*names, "none", "e"))).lock.release()
    write(folder, 0, map(record, names), kv=True)
    write(folder, 1, [record("none"), record("e", "error")])
    return folder


def exported(run: Path, folder: Path, run_kvr: Any) -> list[Path]:
    code, out, err = run_kvr("export", run, "--kv", folder)
    assert code == EXIT_OK and err == "" and "3 documents" in out
    return sorted(folder.glob("*"))


def test_what_goes_out_is_what_is_stored(run: Path, tmp_path: Path, run_kvr: Any) -> None:
    files = exported(run, tmp_path / "kv", run_kvr)
    assert files[0].name.startswith("%C3%A9%C3%A9") and len(files) == 3
    assert [file.name for file in files[1:]] == ["a.safetensors", "dir%2Fb c.safetensors"]
    with safe_open(files[1], framework="pt") as stored:  # as anybody reads it
        kinds = [f"layer_00{n}.{kind}" for n in (0, 2) for kind in ("keys", "values")]
        assert {*stored.keys()} == {*kinds, "token_ids"}
        assert stored.get_tensor("token_ids").tolist() == [7, 8, 9, 5]
    known = {one.id: one for one in open_results(run)}
    for file in files:
        with safe_open(file, framework="pt") as made:
            about = json.loads(made.metadata()["kvr-mpi"])
            for number, pair in stored_layers(run, about["record"]["id"]).items():
                for kind, tensor in zip(("keys", "values"), pair, strict=True):
                    assert torch.equal(made.get_tensor(f"layer_{number:03d}.{kind}"), tensor)
        record = known[about["record"]["id"]]
        assert about["record"] == json.loads(json.dumps(record.as_dict()))
        assert about["identity"] == HEADER.identity and about["text"] == [1, 3]


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=300), min_size=2, max_size=2))
@example([".", "%2E"])
@example(["a/b", "a%2Fb"])
@example(["A", "a"])
def test_no_two_documents_have_the_same_key_or_file_and_none_leads_elsewhere(ids: list[str]) -> None:
    for one in ids:
        assert unquote(key_of(one)) == one and not {"/", "\0"} & {*key_of(one)} and key_of(one) not in (".", "..")
    imitation = tensors_file(key_of(ids[0])).removesuffix(".safetensors")
    names = {one: tensors_file(key_of(one)) for one in (*ids, imitation)}
    assert len(set(names.values())) == len(names)
    assert all(len(name.encode()) <= 250 and "/" not in name for name in names.values())


def test_nothing_is_overwritten_unasked_and_no_planted_link_followed(run: Path, tmp_path: Path, run_kvr: Any) -> None:
    folder, victim = tmp_path / "kv", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("precious")
    (folder / "a.safetensors.part").symlink_to(victim)
    exported(run, folder, run_kvr)
    assert victim.read_text() == "precious" and not (folder / "a.safetensors").is_symlink()
    code, _, err = run_kvr("export", run, "--kv", folder)
    assert code == EXIT_CONFIG and "--overwrite" in err
    assert run_kvr("export", run, "--kv", folder, "--overwrite")[0] == EXIT_OK
