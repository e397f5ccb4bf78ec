"""``kvr inspect``: runs and documents shown to people, and to programs as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import torch
from constants import Kvr
from made_runs import kv_in, take
from shown_runs import COLUMNS, HEADER, example_records, write_run

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_OK
from kvr_mpi.store.record import Record
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.volumes import RESULTS


def test_inspect_shows_every_document_of_a_file_and_of_a_folder(run_folder: Path, run_kvr: Kvr) -> None:
    for merge in (False, True):
        path = merge_run(run_folder) if merge else run_folder
        code, out, err = run_kvr("inspect", path)
        assert code == EXIT_OK and err == ""
        assert "tiny/Llama (LlamaForCausalLM, float32)" in out and "torch" in out
        assert all(record.id in out for record in example_records())
        for word in ("60+40", "2 prompts", "1.50 s", "4 done, 1 failed", "not UTF-8", "[red]brackets[/red] [/b]"):
            assert word in out
    told = json.loads(run_kvr("inspect", run_folder, "--json")[1])
    assert told["model"] == HEADER.model and told["identity"] == HEADER.identity
    assert told["software"]["torch"] == torch.__version__
    assert (told["done"], told["errors"]) == (4, 1)
    assert told["documents"] == [record.id for record in example_records()]


def test_inspect_shows_one_document(run_folder: Path, run_kvr: Kvr) -> None:
    for record in example_records():
        code, out, err = run_kvr("inspect", run_folder, record.id)
        assert code == EXIT_OK and err == ""
        for name, value in record.as_dict().items():
            if name not in ("answer", "token_ids"):
                assert (f"\n{name:21} " in f"\n{out}") == bool(value)
            if value and isinstance(value, float):
                assert f"{name:21} {value:.4g}\n" in out
        if record.status == "done":
            assert out.endswith("\n\n" + record.answer.replace("\r", "") + "\n")
        told = json.loads(run_kvr("inspect", run_folder, record.id, "--json")[1])
        assert list(told) == [*COLUMNS, "kv"] and {name: told[name] for name in COLUMNS} == record.as_json()


def test_inspect_tells_of_keys_and_values_so_that_others_find_them(run_folder: Path, run_kvr: Kvr) -> None:
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in run_folder.iterdir()}
    _, out, _ = run_kvr("inspect", run_folder, "sub/dir/plain.md")
    (line,) = (line for line in out.splitlines() if line.startswith("stored in "))
    assert '"Short."' in Path(line.removeprefix("stored in ").strip()).read_text()
    _, out, _ = run_kvr("inspect", run_folder, "0001")
    assert "2 layers, keys [100, 2, 8], values [100, 2, 8], float32" in out
    (line,) = (line for line in out.splitlines() if line.startswith("kv stored in "))
    with h5py.File(line.removeprefix("kv stored in ").strip()) as stored:
        assert kv_in(stored, "0001")["layer_000/keys"].shape == (100, 2, 8)
    _, out, _ = run_kvr("inspect", run_folder, "0001", "--json")
    layer = {"keys": [100, 2, 8], "values": [100, 2, 8], "dtype": "float32"}
    assert json.loads(out)["kv"] == [{"layer": 0, **layer}, {"layer": 2, **layer}]
    assert json.loads(run_kvr("inspect", run_folder, "nasty", "--json")[1])["kv"] == []
    assert run_kvr("export", run_folder)[0] == EXIT_OK
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in run_folder.iterdir()} == before
    assert not (run_folder / RESULTS).exists(), "reading leaves a run as it is"


def test_inspect_shows_all_answers_and_all_scores(tmp_path: Path, run_kvr: Kvr) -> None:
    samples = json.dumps([{"answer": "one way"}, {"answer": "another"}])
    scores = json.dumps([{"text": " yes", "logprob": -12.5}, {"text": " no", "logprob": -11.0}])
    records = [Record("n", "done", answer="one way", samples=samples), Record("s", "done", scores=scores)]
    path = write_run(tmp_path / "run", records)
    assert run_kvr("inspect", path, "n")[1].endswith("\n\n1 of 2: one way\n\n2 of 2: another\n")
    assert run_kvr("inspect", path, "s")[1].endswith("\n\n' yes' -12.500, ' no' -11.000\n")


def test_a_run_without_records_is_told_from_no_run(tmp_path: Path, run_kvr: Kvr) -> None:
    empty, begun, other = (tmp_path / name for name in ("empty", "begun", "other"))
    for folder in (empty, other):
        folder.mkdir()
    (other / "notes.txt").touch()
    take(begun, mode="new").lock.release()
    for command in ("inspect", "export"):
        for folder, words in (
            (empty, "is empty; a job that has just begun loads its model first"),
            (begun, "no document is stored yet; see `kvr status"),
            (other, "no result file"),
        ):
            code, _, err = run_kvr(command, folder)
            assert code == EXIT_BAD_DATA and words in err, err
