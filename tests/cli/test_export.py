"""``kvr export``: results handed to jq and pandas whole, in every format."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
from dataclasses import fields
from pathlib import Path

import pandas
import pytest
from constants import Kvr
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shown_runs import COLUMNS, HEADER, NASTY, example_records, exported, write_run

import kvr_mpi.store.export as export_module
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK, EXIT_USAGE
from kvr_mpi.store.record import REALS, Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.rewrite import merge_run
from kvr_mpi.store.writer import ResultWriter

# Fields of the documents' own rows are columns by themselves: none here.
TABLE_COLUMNS = [name for name in COLUMNS if name != "columns"]
ANSWER = st.one_of(
    st.sampled_from(
        ["", "\n", NASTY, '"', ",", "\r", "\r\n", "null", "NA", "1.0", "true", "=1+1", "#", "\u2028", " x "]
    ),
    st.text(max_size=40),
)


def test_jsonl_is_one_object_per_line_with_every_field(result: Path, run_kvr: Kvr) -> None:
    code, out, err = run_kvr("export", result)
    assert code == EXIT_OK and err == "" and out.endswith("\n")
    rows = [json.loads(line) for line in out.removesuffix("\n").split("\n")]
    assert rows == [record.as_json() for record in example_records()]
    assert all(list(row) == COLUMNS for row in rows)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_jsonl_of_numbers_that_json_cannot_hold_is_still_json(tmp_path: Path, value: float, run_kvr: Kvr) -> None:
    path = write_run(tmp_path / "run", [Record("a", "done", prefill_tokens_per_s=value)])

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON (RFC 8259)")

    for command in (["export", path], ["inspect", path, "a", "--json"]):
        code, out, _ = run_kvr(*command)
        assert code in (EXIT_OK, EXIT_BAD_DATA)
        for line in out.splitlines():
            json.loads(line, parse_constant=refuse)


def read_csv(content: bytes) -> pandas.DataFrame:
    return pandas.read_csv(
        io.BytesIO(content), keep_default_na=False, dtype={"id": str, "answer": str, "error": str, "slices": str}
    )


def test_csv_is_read_by_pandas_with_answers_intact(result: Path) -> None:
    frame = read_csv(exported(result, "csv"))
    wanted = {record.id: record for record in example_records()}
    assert list(frame.columns) == TABLE_COLUMNS and list(frame["id"]) == sorted(wanted)
    for row in frame.to_dict("records"):
        record = wanted[row["id"]]
        assert row["answer"] == record.answer and row["error"] == record.error and row["status"] == record.status
        assert row["token_ids"] == " ".join(map(str, record.token_ids))
        assert row["slices"] == " ".join(map(str, record.slices))
    assert frame["prompt_tokens"].dtype == "int64" and frame["ttft_s"].dtype == "float64"


def test_csv_has_answers_and_what_was_asked_for(tmp_path: Path, run_kvr: Kvr) -> None:
    plain = write_run(tmp_path / "plain", [Record("a", "done", answer="yes", slices=(0, 5)), Record("b", "error")])
    header = run_kvr("export", plain, "--format", "csv")[1].splitlines()[0]
    assert header == '"id","status","error","answer","coverage"'
    scored = Record("a#q", "done", document="a", question="Why?", scores='[{"text": "x"}]')
    asked = write_run(tmp_path / "asked", [Record("0", "error", error="empty"), scored])
    frame = read_csv(run_kvr("export", asked, "--format", "csv")[1].encode())
    assert list(frame.columns) == ["id", "status", "document", "question", "error", "answer", "scores", "coverage"]
    assert list(frame["question"]) == ["", "Why?"] and list(frame["scores"]) == ["", scored.scores]


@settings(max_examples=25)
@given(answers=st.lists(ANSWER, min_size=1, max_size=6), kind=st.sampled_from(["jsonl", "csv", "parquet"]))
@example(answers=[NASTY, "", "\r"], kind="csv")
@example(answers=[NASTY, "", "\r"], kind="jsonl")
def test_any_answer_gets_through_any_format(
    tmp_path_factory: pytest.TempPathFactory, answers: list[str], kind: str
) -> None:
    records = [Record(f"{n}", "done", answer=answer) for n, answer in enumerate(answers)]
    content = exported(write_run(tmp_path_factory.mktemp("any"), records), kind)
    if kind == "jsonl":
        got = [json.loads(line)["answer"] for line in content.decode().removesuffix("\n").split("\n")]
    elif kind == "csv":
        got = list(read_csv(content)["answer"])
    else:
        got = list(pandas.read_parquet(io.BytesIO(content))["answer"])
    assert got == [answer.replace("\0", "\ufffd") for answer in answers]


def test_parquet_is_read_by_pandas_with_the_right_types(result: Path, tmp_path: Path, run_kvr: Kvr) -> None:
    target = tmp_path / "answers.parquet"
    code, out, err = run_kvr("export", result, "--format", "parquet", "-o", target)
    assert (code, out, err) == (EXIT_OK, "", "")
    frame = pandas.read_parquet(target)
    assert list(frame.columns) == TABLE_COLUMNS
    for spec in fields(Record):
        if spec.name not in TABLE_COLUMNS:
            continue
        column = frame[spec.name]
        if spec.type == "int":
            assert column.dtype == "int64"
        elif spec.type == "float":
            assert column.dtype == "float64"
        elif spec.type == "str":
            assert pandas.api.types.is_string_dtype(column) and all(isinstance(value, str) for value in column)
        else:
            kind = "float64" if spec.name in REALS else "int64"
            assert all(value.dtype == kind for value in column)
    wanted = {record.id: record for record in example_records()}
    for row in frame.to_dict("records"):
        record = wanted.pop(row["id"])
        assert row["answer"] == record.answer and tuple(row["token_ids"]) == record.token_ids
    assert wanted == {}


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7])
def test_parquet_has_all_rows_whatever_the_size_of_a_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(export_module, "BATCH_ROWS", 3)
    ids = [f"doc-{n}" for n in range(count)]
    writer = ResultWriter(tmp_path, 0, HEADER)
    writer.write(Record("other", "done"))
    for name in ids:
        writer.write(Record(name, "done"))
    writer.flush()
    assert list(pandas.read_parquet(io.BytesIO(exported(tmp_path, "parquet")))["id"]) == [*ids, "other"]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_folder_exports_the_same_as_its_merged_file(run_folder: Path, kind: str) -> None:
    before = exported(run_folder, kind)
    result = merge_run(run_folder)
    assert exported(result, kind) == exported(run_folder, kind) == before
    assert len(before) > 100


def test_output_is_utf8_whatever_the_locale(result: Path, kvr: Path) -> None:
    env = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for kind in ("jsonl", "csv"):
        done = subprocess.run(
            [kvr, "export", result, "--format", kind], capture_output=True, timeout=300, env=env, check=True
        )
        assert "😀" in done.stdout.decode("utf-8")


def test_an_existing_output_file_is_kept_unless_told_otherwise(result: Path, tmp_path: Path, run_kvr: Kvr) -> None:
    target = tmp_path / "answers.jsonl"
    target.write_text("precious")
    code, out, err = run_kvr("export", result, "-o", target)
    assert code == EXIT_CONFIG and out == "" and len(err.splitlines()) == 1
    assert str(target) in err and "--overwrite" in err
    assert target.read_text() == "precious"
    assert run_kvr("export", result, "-o", target, "--overwrite") == (EXIT_OK, "", "")
    assert target.read_bytes() == exported(result, "jsonl")
    assert list(tmp_path.glob("*.part")) == []


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("-o RESULT --overwrite", EXIT_CONFIG),
        ("-o absent/answers.jsonl", EXIT_CONFIG),
        ("-o file/answers.jsonl --overwrite", EXIT_CONFIG),
        ("-o file/deep/answers.jsonl", EXIT_CONFIG),
        ("--format parquet", EXIT_USAGE),  # nothing for a terminal
        ("--kv kv -o answers.jsonl", EXIT_USAGE),
    ],
)
def test_what_cannot_or_must_not_be_written_is_refused(
    result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: int, run_kvr: Kvr
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    records = list(open_results(result))
    found, out, err = run_kvr("export", result, *words.replace("RESULT", str(result)).split())
    assert (found, out) == (code, "") and (words.split()[1].replace("RESULT", str(result)) in err or "-o" in err)
    assert (tmp_path / "file").read_text() == "mine" and list(open_results(result)) == records
