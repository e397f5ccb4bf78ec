"""``kvr inspect`` and ``kvr export``: results shown to people, and handed to jq and pandas whole."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from click import Context
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvr_mpi.store.export as export_module
from kvr_mpi.cli import group
from kvr_mpi.cli import kvr as kvr_main
from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK, EXIT_USAGE
from kvr_mpi.store.export import write_export
from kvr_mpi.store.folder import RESULTS, read_run
from kvr_mpi.store.merge import merge_run
from kvr_mpi.store.outputs import Header, KeysValues, Record
from kvr_mpi.store.shards import ShardWriter

HEADER = Header(
    {"model": "0123abcd", "prompt": {"template": "Summarise: {text}"}},
    {"name": "tiny/Llama", "architecture": "LlamaForCausalLM", "dtype": "float32"},
)
NASTY = 'First line.\nSecond, "quoted" and \'single\'; a, b, c\r\n\n\ttab 😀 é \\n ""'
COLUMNS = [spec.name for spec in fields(Record)]
ANSWER = st.one_of(
    st.sampled_from(
        ["", "\n", NASTY, '"', ",", "\r", "\r\n", "null", "NA", "1.0", "true", "=1+1", "#", "\u2028", " x "]
    ),
    st.text(max_size=40),
)
Kvr = Callable[..., tuple[int, str, str]]


def example_records() -> list[Record]:
    """Five documents, in the order of their ids, one of them failed."""
    base = Record(
        "", "done", token_ids=(1, 2, 3), slices=(0, 60, 100), document_sha256="ab" * 32, prompt_sha256="cd" * 32,
        prompt_tokens=100, dropped_tokens=2, new_tokens=3, finish_reason="stop", strategy="kvr", ttft_s=1.5,
        prefill_tokens_per_s=66.6, wait_s=0.25, decode_s=2.125, finished_at="2026-01-01T00:00:00.000+00:00",
    )  # fmt: skip
    return [
        replace(base, id="0001", answer="An id that looks like a number."),
        replace(base, id="bad.txt", status="error", error='the file "bad.txt" is not UTF-8,\nre-encode it', answer=""),
        replace(base, id="nasty", answer=NASTY),
        replace(base, id="sub/dir/plain.md", answer="Short."),
        replace(base, id="z [bold]ü[/bold] 漢.txt", answer="[red]brackets[/red] [/b]", parts=2),
    ]


def write_run(folder: Path, records: Sequence[Record], layers: Sequence[KeysValues | None] = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, "0000", HEADER)
    for record in records:
        writer.write(record, layers if record.status == "done" else ())
    writer.flush()
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run still in shards: nothing is merged yet."""
    records = example_records()
    layer = torch.zeros(100, 2, 8)
    write_run(tmp_path / "run", records[:2], [(layer, layer), None, (layer, layer)])
    return write_run(tmp_path / "run", records[2:])


@pytest.fixture
def result(tmp_path: Path, run_folder: Path) -> Path:
    return merge_run(run_folder)


@pytest.fixture
def run_kvr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvr:
    """Run the entry point of ``kvr`` in this process: code, standard output, standard error."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvr", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            kvr_main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return run


def exported(path: Path, kind: str) -> bytes:
    stream = io.BytesIO()
    write_export(read_run(path), kind, stream)
    return stream.getvalue()


# export


def test_jsonl_is_one_object_per_line_with_every_field(result: Path, run_kvr: Kvr) -> None:
    code, out, err = run_kvr("export", result)
    assert code == EXIT_OK and err == "" and out.endswith("\n")
    rows = [json.loads(line) for line in out.removesuffix("\n").split("\n")]
    assert rows == [record.as_dict() for record in example_records()]
    assert all(list(row) == COLUMNS for row in rows)


def test_jsonl_is_read_by_pandas(result: Path) -> None:
    lines = exported(result, "jsonl")
    frame = pandas.read_json(io.BytesIO(lines), lines=True, dtype=False)
    wanted = {record.id: record for record in example_records()}
    assert list(frame.columns) == COLUMNS and list(frame["id"]) == sorted(wanted)
    for row in frame.to_dict("records"):
        record = wanted[row["id"]]
        assert row["answer"] == record.answer and row["error"] == record.error
        assert tuple(row["token_ids"]) == record.token_ids and tuple(row["slices"]) == record.slices
        assert row["prompt_tokens"] == record.prompt_tokens and row["ttft_s"] == record.ttft_s


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
    assert list(frame.columns) == COLUMNS and list(frame["id"]) == sorted(wanted)
    for row in frame.to_dict("records"):
        record = wanted[row["id"]]
        assert row["answer"] == record.answer and row["error"] == record.error and row["status"] == record.status
        assert row["token_ids"] == " ".join(map(str, record.token_ids))
        assert row["slices"] == " ".join(map(str, record.slices))
    assert frame["prompt_tokens"].dtype == "int64" and frame["ttft_s"].dtype == "float64"


@settings(max_examples=25, deadline=None)
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
    assert list(frame.columns) == COLUMNS
    for spec in fields(Record):
        column = frame[spec.name]
        if spec.type == "int":
            assert column.dtype == "int64"
        elif spec.type == "float":
            assert column.dtype == "float64"
        elif spec.type == "str":
            assert pandas.api.types.is_string_dtype(column) and all(isinstance(value, str) for value in column)
        else:
            assert all(value.dtype == "int64" for value in column)
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
    writer = ShardWriter(tmp_path, "0000", HEADER)
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


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_the_file_has_what_standard_output_would(result: Path, kvr: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "answers.txt"
    command: list[str | Path] = [kvr, "export", result, "--format", kind]
    to_output = subprocess.run(command, capture_output=True, timeout=60, check=True)
    to_file = subprocess.run([*command, "-o", target], capture_output=True, timeout=60, check=True)
    assert to_output.stdout == target.read_bytes() == exported(result, kind)
    assert to_output.stderr == to_file.stderr == to_file.stdout == b""
    assert list(tmp_path.glob("*.part")) == []


def test_output_is_utf8_whatever_the_locale(result: Path, kvr: Path) -> None:
    env = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for kind in ("jsonl", "csv"):
        done = subprocess.run(
            [kvr, "export", result, "--format", kind], capture_output=True, timeout=60, env=env, check=True
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


def test_the_input_is_not_overwritten_by_its_own_export(result: Path, run_kvr: Kvr) -> None:
    records = list(read_run(result))
    code, _, err = run_kvr("export", result, "-o", result, "--overwrite")
    assert code in (EXIT_CONFIG, EXIT_USAGE) and err
    assert list(read_run(result)) == records


@pytest.mark.parametrize("place", ["absent/answers.jsonl", "file/answers.jsonl", "file/deep/answers.jsonl"])
def test_an_output_file_that_cannot_be_made_is_refused(result: Path, tmp_path: Path, place: str, run_kvr: Kvr) -> None:
    (tmp_path / "file").write_text("mine")
    for more in ([], ["--overwrite"]):
        code, out, err = run_kvr("export", result, "-o", tmp_path / place, *more)
        assert code == EXIT_CONFIG and out == "" and len(err.splitlines()) == 1 and place in err
    assert (tmp_path / "file").read_text() == "mine"


def test_parquet_is_not_written_to_a_terminal(result: Path, run_kvr: Kvr) -> None:
    code, out, err = run_kvr("export", result, "--format", "parquet")
    assert code == EXIT_USAGE and out == "" and "-o" in err


@pytest.mark.parametrize(
    "arguments", [["export"], ["export", "x", "--format", "xml"], ["inspect"], ["inspect", "a", "b", "c"], ["explain"]]
)
def test_wrong_arguments_are_a_usage_error(arguments: list[str], run_kvr: Kvr) -> None:
    code, out, err = run_kvr(*arguments)
    assert code == EXIT_USAGE and out == "" and "Usage: kvr" in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_help_names_every_option(command: str) -> None:
    result = CliRunner().invoke(group, [command, "--help"], prog_name="kvr")
    assert result.exit_code == EXIT_OK
    found = group.get_command(Context(group), command)
    assert found is not None
    options = [option for parameter in found.params for option in parameter.opts if option.startswith("--")]
    assert len(options) > 0 and all(option in result.output for option in options)


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_nothing_to_read_is_bad_data_or_a_wrong_path(tmp_path: Path, command: str, run_kvr: Kvr) -> None:
    (tmp_path / "empty").mkdir()
    for path, expected in ((tmp_path / "absent.h5", EXIT_CONFIG), (tmp_path / "empty", EXIT_BAD_DATA)):
        code, out, err = run_kvr(command, path)
        assert code == expected and out == "" and len(err.splitlines()) == 1 and path.name in err


# Pipes


def test_head_gets_its_line_and_nobody_complains(tmp_path: Path, kvr: Path) -> None:
    # More than fits into a pipe, so that export is still writing when head has gone.
    path = write_run(tmp_path / "run", [Record(f"{n:03d}", "done", answer="x" * 5000) for n in range(60)])
    for command in (f"{kvr} export {path}", f"{kvr} export {path} --format csv", f"{kvr} inspect {path} 000"):
        done = subprocess.run(
            f"{command} | head -1", shell=True, capture_output=True, text=True, timeout=60, check=True
        )
        assert len(done.stdout.splitlines()) == 1
        assert done.stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [["export"], ["export", "--format", "csv"], ["inspect"], ["inspect", "--json"], ["inspect", "nasty"]],
    ids=" ".join,
)
def test_a_reader_that_has_gone_is_no_traceback(result: Path, kvr: Path, arguments: list[str]) -> None:
    # Little output stays in a buffer until the very end; it is there that writing fails.
    source, sink = os.pipe()
    os.close(source)
    command: list[str | Path] = [kvr, arguments[0], result, *arguments[1:]]
    with os.fdopen(sink, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.stderr == ""


# inspect


def test_inspect_shows_every_document_of_a_file_and_of_a_folder(run_folder: Path, run_kvr: Kvr) -> None:
    for merge in (False, True):
        path = merge_run(run_folder) if merge else run_folder
        code, out, err = run_kvr("inspect", path)
        assert code == EXIT_OK and err == ""
        assert "tiny/Llama (LlamaForCausalLM, float32)" in out and "torch" in out
        for record in example_records():
            assert record.id in out
        assert "60+40" in out and "2 prompts" in out and "1.50 s" in out
        assert "4 done, 1 error(s)" in out and "not UTF-8" in out
        assert "[red]brackets[/red] [/b]" in out


def test_inspect_json_is_one_object(run_folder: Path, run_kvr: Kvr) -> None:
    code, out, err = run_kvr("inspect", run_folder, "--json")
    assert code == EXIT_OK and err == ""
    told = json.loads(out)
    assert told["model"] == HEADER.model and told["identity"] == HEADER.identity
    assert told["software"]["torch"] == torch.__version__
    assert (told["done"], told["errors"]) == (4, 1)
    assert told["documents"] == [record.id for record in example_records()]


@pytest.mark.parametrize("record", example_records(), ids=lambda record: record.id)
def test_inspect_shows_one_document(run_folder: Path, record: Record, run_kvr: Kvr) -> None:
    for path in (run_folder, merge_run(run_folder)):
        code, out, err = run_kvr("inspect", path, record.id)
        assert code == EXIT_OK and err == ""
        for name, value in record.as_dict().items():
            if name not in ("answer", "token_ids"):
                assert f"{name:21} {value}" in out
        if record.status == "done":
            assert out.endswith("\n\n" + record.answer.replace("\r", "") + "\n")


def test_inspect_shows_where_a_document_is_so_that_h5py_finds_it(run_folder: Path, run_kvr: Kvr) -> None:
    import h5py

    _, out, _ = run_kvr("inspect", run_folder, "sub/dir/plain.md")
    (line,) = (line for line in out.splitlines() if line.startswith("group "))
    file, _, name = line.split(maxsplit=1)[1].rpartition(":")
    with h5py.File(file) as stored:
        assert stored[name]["answer"].asstr()[()] == "Short."


def test_inspect_tells_of_keys_and_values(run_folder: Path, run_kvr: Kvr) -> None:
    _, out, _ = run_kvr("inspect", run_folder, "0001")
    assert "2 layers, keys [100, 2, 8], values [100, 2, 8], float32" in out
    _, out, _ = run_kvr("inspect", run_folder, "0001", "--json")
    layer = {"keys": [100, 2, 8], "values": [100, 2, 8], "dtype": "float32"}
    assert json.loads(out)["kv"] == [{"layer": 0, **layer}, {"layer": 2, **layer}]
    _, out, _ = run_kvr("inspect", run_folder, "nasty", "--json")
    assert json.loads(out)["kv"] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_inspect_names_the_models_own_type(tmp_path: Path, dtype: str, run_kvr: Kvr) -> None:
    layer = torch.ones(3, 1, 2, dtype=getattr(torch, dtype))
    path = write_run(tmp_path / "run", [Record("a", "done")], [(layer, layer)])
    code, out, _ = run_kvr("inspect", path, "a")
    assert code == EXIT_OK and f"1 layers, keys [3, 1, 2], values [3, 1, 2], {dtype}" in out


@pytest.mark.parametrize("record", example_records(), ids=lambda record: record.id)
def test_inspect_json_of_a_document_has_every_field(run_folder: Path, record: Record, run_kvr: Kvr) -> None:
    code, out, _ = run_kvr("inspect", run_folder, record.id, "--json")
    told: dict[str, Any] = json.loads(out)
    assert code == EXIT_OK and list(told) == [*COLUMNS, "kv"]
    assert {name: told[name] for name in COLUMNS} == record.as_dict()


def test_inspect_of_an_unknown_document_names_some_that_exist(result: Path, run_kvr: Kvr) -> None:
    for more in ([], ["--json"]):
        code, out, err = run_kvr("inspect", result, "nasti", *more)
        assert code == EXIT_CONFIG and out == "" and len(err.splitlines()) == 1
        assert "'nasti'" in err and "nasty" in err and "0001" in err and "bad.txt" in err


def test_inspect_of_many_documents_does_not_name_them_all(tmp_path: Path, run_kvr: Kvr) -> None:
    path = write_run(tmp_path / "run", [Record(f"doc-{n:03d}", "done") for n in range(100)])
    _, _, err = run_kvr("inspect", path, "x")
    assert "100" in err and "doc-000" in err and "doc-099" not in err and len(err) < 1000


def test_reading_leaves_the_run_as_it_is(run_folder: Path, run_kvr: Kvr) -> None:
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in run_folder.iterdir()}
    for command in (["inspect", run_folder], ["inspect", run_folder, "nasty"], ["export", run_folder]):
        assert run_kvr(*command)[0] == EXIT_OK
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in run_folder.iterdir()} == before
    assert not (run_folder / RESULTS).exists()
