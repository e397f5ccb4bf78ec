"""``kvr export``: results handed to jq and pandas whole, in every format."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pandas
import pytest
from constants import Kvr
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_runs import COLUMNS, NASTY, example_records, exported, write_run

import kvr_mpi.store.export as export_module
from kvr_mpi.errors import EXIT_CONFIG, EXIT_OK, EXIT_USAGE
from kvr_mpi.store.record import REALS, Record
from kvr_mpi.store.rewrite import merge_run

# Fields of the documents' own rows are columns by themselves: none here.
TABLE_COLUMNS = [name for name in COLUMNS if name != "columns"]
ANSWER = st.one_of(
    st.sampled_from(
        ["", "\n", NASTY, '"', ",", "\r", "\r\n", "null", "NA", "1.0", "true", "=1+1", "#", "\u2028", " x "]
    ),
    st.text(max_size=40),
)


def read_csv(content: bytes) -> pandas.DataFrame:
    return pandas.read_csv(
        io.BytesIO(content), keep_default_na=False, dtype={"id": str, "answer": str, "error": str, "slices": str}
    )


def test_jsonl_is_one_object_per_line_with_every_field(run_folder: Path, run_kvr: Kvr) -> None:
    code, out, err = run_kvr("export", run_folder)
    assert code == EXIT_OK and err == "" and out.endswith("\n")
    rows = [json.loads(line) for line in out.removesuffix("\n").split("\n")]
    assert rows == [record.as_json() for record in example_records()]
    assert all(list(row) == COLUMNS for row in rows)
    tables = [exported(run_folder, kind) for kind in ("csv", "parquet")]
    result = merge_run(run_folder)
    assert run_kvr("export", result) == run_kvr("export", run_folder) == (EXIT_OK, out, "")
    assert [exported(result, kind) for kind in ("csv", "parquet")] == tables


def test_tables_are_read_by_pandas_with_answers_and_types_intact(result: Path, tmp_path: Path, run_kvr: Kvr) -> None:
    target = tmp_path / "answers.parquet"
    assert run_kvr("export", result, "--format", "parquet", "-o", target) == (EXIT_OK, "", "")
    plain, frame = read_csv(exported(result, "csv")), pandas.read_parquet(target)
    assert list(plain.columns) == list(frame.columns) == TABLE_COLUMNS
    assert plain["prompt_tokens"].dtype == "int64" and plain["ttft_s"].dtype == "float64"
    for spec in (spec for spec in fields(Record) if spec.name in TABLE_COLUMNS):
        column = frame[spec.name]
        if spec.type in ("int", "float"):
            assert column.dtype == f"{spec.type}64"
        elif spec.type == "str":
            assert pandas.api.types.is_string_dtype(column) and all(isinstance(value, str) for value in column)
        else:
            assert all(value.dtype == ("float64" if spec.name in REALS else "int64") for value in column)
    for line, row, record in zip(plain.to_dict("records"), frame.to_dict("records"), example_records(), strict=True):
        for name in ("id", "answer", "error", "status"):
            assert line[name] == row[name] == getattr(record, name)
        for name in ("token_ids", "slices"):
            assert line[name] == " ".join(map(str, row[name])) and tuple(row[name]) == getattr(record, name)


def test_csv_has_answers_and_what_was_asked_for(tmp_path: Path, run_kvr: Kvr) -> None:
    plain = write_run(tmp_path / "plain", [Record("a", "done", answer="yes", slices=(0, 5)), Record("b", "error")])
    header = run_kvr("export", plain, "--format", "csv")[1].splitlines()[0]
    assert header == '"id","status","error","answer","finish_reason","coverage"'
    scored = Record("a#q", "done", document="a", question="Why?", scores='[{"text": "x"}]')
    asked = write_run(tmp_path / "asked", [Record("0", "error", error="empty"), scored])
    frame = read_csv(run_kvr("export", asked, "--format", "csv")[1].encode())
    assert list(frame.columns) == [
        "id",
        "status",
        "document",
        "question",
        "error",
        "answer",
        "scores",
        "finish_reason",
        "coverage",
    ]
    assert list(frame["question"]) == ["", "Why?"] and list(frame["scores"]) == ["", scored.scores]


def test_chosen_fields_in_the_given_order(result: Path, tmp_path: Path, run_kvr: Kvr) -> None:
    records, names = example_records(), ["answer", "id", "coverage"]
    code, out, err = run_kvr("export", result, "--fields", "answer, id,coverage")
    assert (code, err) == (EXIT_OK, "")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [list(line) for line in lines] == [names] * len(records)
    assert [line["id"] for line in lines] == [record.id for record in records]
    table = read_csv(run_kvr("export", result, "--fields", ",".join(names), "--format", "csv")[1].encode())
    assert list(table.columns) == names and list(table["answer"]) == [record.answer for record in records]
    target = tmp_path / "two.parquet"
    assert run_kvr("export", result, "--fields", "id,answer", "--format", "parquet", "-o", target)[0] == EXIT_OK
    assert list(pandas.read_parquet(target).columns) == ["id", "answer"]
    code, _, err = run_kvr("export", result, "--fields", "id,anwser")
    assert code == EXIT_CONFIG and "'anwser'" in err and "finish_reason" in err
    assert run_kvr("export", result, "--fields", "id", "--format", "openai-batch")[0] == EXIT_USAGE


@settings(max_examples=25)
@given(answers=st.lists(ANSWER, min_size=1, max_size=6))
@example(answers=[NASTY, "", "\r"])
def test_any_answer_gets_through_any_format(tmp_path_factory: pytest.TempPathFactory, answers: list[str]) -> None:
    records = [Record(f"{n}", "done", answer=answer) for n, answer in enumerate(answers)]
    run = write_run(tmp_path_factory.mktemp("any"), records)
    wanted = [answer.replace("\0", "\ufffd") for answer in answers]
    lines = exported(run, "jsonl").decode().removesuffix("\n").split("\n")
    assert [json.loads(line)["answer"] for line in lines] == wanted
    assert list(read_csv(exported(run, "csv"))["answer"]) == wanted
    assert list(pandas.read_parquet(io.BytesIO(exported(run, "parquet")))["answer"]) == wanted


def test_jsonl_of_numbers_that_json_cannot_hold_is_still_json(tmp_path: Path, run_kvr: Kvr) -> None:
    values = {"a": math.nan, "b": math.inf, "c": -math.inf}
    path = write_run(tmp_path / "run", [Record(name, "done", ttft_s=value) for name, value in values.items()])
    for command in (["export", path], *(["inspect", path, name, "--json"] for name in values)):
        lines = run_kvr(*command)[1].splitlines()
        assert lines and not [line for line in lines if re.search(r"\b(NaN|Infinity)\b", line)], "RFC 8259"


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7])
def test_parquet_has_all_rows_whatever_the_size_of_a_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(export_module, "BATCH_ROWS", 3)
    ids = [f"doc-{n}" for n in range(count)]
    path = write_run(tmp_path / "run", [Record(name, "done") for name in ["other", *ids]])
    assert list(pandas.read_parquet(io.BytesIO(exported(path, "parquet")))["id"]) == [*ids, "other"]


def test_output_is_utf8_whatever_the_locale(result: Path, kvr: Path) -> None:
    env = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for kind in ("jsonl", "csv"):
        command = [kvr, "export", result, "--format", kind]
        done = subprocess.run(command, capture_output=True, timeout=300, env=env, check=True)
        assert "😀" in done.stdout.decode("utf-8")


@pytest.mark.parametrize("words", ["--format parquet", "--kv kv -o answers.jsonl"])
def test_tables_are_nothing_for_a_terminal_and_tensors_no_table(result: Path, words: str, run_kvr: Kvr) -> None:
    code, out, err = run_kvr("export", result, *words.split())
    assert (code, out) == (EXIT_USAGE, "") and "-o" in err
