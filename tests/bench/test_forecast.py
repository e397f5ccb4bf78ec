"""``forecast`` and ``paper``: forecasts, the paper's cells, and other cells of the same columns."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from constants import ROOT

from benchmarks.forecast import main as forecast
from benchmarks.paper import main as paper
from benchmarks.paper_cells import COLUMNS, METHODS, paper_cells
from kvr_mpi.errors import ConfigError, DataError, KvrError, ModelError, OutputError
from kvr_mpi.schedule.simulate import NAMES

STRATEGIES = {"single", "tsp-dense", "tsp-causal", "ring", "kvr-e", "kvr-s"}


def run(*args: str | Path, command: click.Command = forecast) -> str:
    result: Result = CliRunner().invoke(command, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def cells_file(tmp_path: Path, *rows: str, header: str = ",".join(COLUMNS)) -> Path:
    file = tmp_path / "cells.csv"
    file.write_text("\n".join([header, *rows]) + "\n")
    return file


def test_a_table_says_who_wins() -> None:
    lines = run("--ranks", "1,2", "--contexts", "8k").splitlines()
    assert "h100-80gb" in lines[0] and "not measured" in lines[0]
    assert [line.split()[:2] for line in lines[-2:]] == [["8192", "1"], ["8192", "2"]]
    assert lines[-1].split()[-1] == "kvr-s"
    names = next(line.split() for line in lines if line.split()[:2] == ["tokens", "ranks"])
    assert names[2:-3] == list(NAMES) and len(names) == len(lines[-1].split()), "a column each"


def test_json_and_csv_hold_the_same_rows(tmp_path: Path) -> None:
    args = ("--model", "llama 7b", "--hardware", "a100-80gb", "--ranks", "1,4", "--contexts", "4k,16k")
    found = json.loads(run(*args, "--json"))
    assert found["relay"] == "store-and-forward", "eager attention is that of the paper"
    assert [(row["context_tokens"], row["ranks"]) for row in found["rows"]] == [
        (4096, 1),
        (4096, 4),
        (16384, 1),
        (16384, 4),
    ]
    for row in found["rows"]:
        assert set(row["ttft_s"]) == (STRATEGIES if row["ranks"] > 1 else {"single"})
        assert row["winner"] == min(row["ttft_s"], key=row["ttft_s"].get)
        assert len(row["slices"]) == row["ranks"] + 1
        assert row["bound_s"] <= min(row["ttft_s"].values())
        if row["ranks"] > 1:
            assert row["efficiency"] == pytest.approx(row["ttft_s"]["single"] / row["ranks"] / row["ttft_s"]["kvr-s"])
    file = tmp_path / "rows.csv"
    assert run(*args, "--csv", file) == ""
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [float(row["kvr_s_s"]) for row in rows if row["kvr_s_s"]] == [
        row["ttft_s"]["kvr-s"] for row in found["rows"] if row["ranks"] > 1
    ]
    assert list(csv.DictReader(io.StringIO(run(*args, "--csv")))) == rows


def test_a_slower_link_slows_the_chain() -> None:
    def kvr_s(*link: str) -> float:
        row = json.loads(run("--ranks", "8", "--contexts", "8k", "--json", *link))["rows"][0]
        return float(row["ttft_s"]["kvr-s"])

    assert kvr_s("--link-gigabytes-per-s", "1") > kvr_s() == kvr_s("--link-gigabytes-per-s", "50")


def test_a_model_on_disk(tmp_path: Path) -> None:
    from models import CONFIGS

    CONFIGS["llama-gqa"]().save_pretrained(tmp_path)
    found = json.loads(run("--model", tmp_path, "--ranks", "2", "--contexts", "512", "--json"))
    assert found["model"] == str(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        run("--model", tmp_path, "--ranks", "2", "--contexts", "512")


@pytest.mark.parametrize("kind", ["ttft", "slices"])
def test_plots(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "plot.svg"
    run("--ranks", "1,2,4", "--contexts", "4k,8k", "--plot", file, "--plot-kind", kind)
    assert file.read_text().lstrip().startswith("<?xml")
    for name in ("plot.nonsense", "no/such/folder/plot.svg"):
        with pytest.raises(ConfigError, match="--plot"):
            run("--ranks", "2", "--contexts", "4k", "--plot", tmp_path / name, "--plot-kind", kind)


def test_the_papers_cells_beside_the_models(tmp_path: Path) -> None:
    lines = run(command=paper).splitlines()
    assert sum(line.startswith("Table ") for line in lines) == len(paper_cells())
    assert "time to first token (45): median" in lines[-2] and "KVR-S (20): median" in lines[-1]
    found = json.loads(run("--json", command=paper))
    assert set(found) == {"ttft", "speedup", "cells"}
    assert set(found["ttft"]) == set(found["speedup"]) == {"median", "p90", "max"}
    assert 0 < found["ttft"]["median"] < found["ttft"]["p90"] < found["ttft"]["max"]
    assert [cell["ttft_s"] for cell in found["cells"]] == [cell.ttft_s for cell in paper_cells()]
    file = tmp_path / "cells.csv"
    run("--csv", file, command=paper)
    assert [float(row["predicted_s"]) for row in csv.DictReader(file.read_text().splitlines())] == [
        cell["predicted_s"] for cell in found["cells"]
    ]


def test_every_method_and_model_can_be_scored(tmp_path: Path) -> None:
    models = ("Llama 13B", "Llama 30B", "Llama 7B MQA", "Llama 7B GQA8", "falcon-1b")
    rows = [f"T,{model},2,8192,10,{method},1.5" for model in models for method in METHODS]
    found = json.loads(run("--score", cells_file(tmp_path, *rows), "--json", command=paper))
    assert len(found["cells"]) == len(rows)
    for at in range(0, len(rows), len(METHODS)):
        seconds = {cell["method"]: cell["predicted_s"] for cell in found["cells"][at : at + len(METHODS)]}
        assert seconds["KVR-S"] <= seconds["KVR-P"] <= seconds["KVR-E"] * 1.01
        assert seconds["KVR-S"] < seconds["TSP"] < seconds["base"] * 1.5


def test_errors_are_relative_to_what_was_measured(tmp_path: Path) -> None:
    predicted_s = json.loads(
        run("--score", cells_file(tmp_path, "T,Llama 7B,1,4096,0,base,1"), "--json", command=paper)
    )["cells"][0]["predicted_s"]
    rows = [f"T,Llama 7B,1,4096,0,base,{predicted_s * factor}" for factor in (1, 2, 0.5)]
    found = json.loads(run("--score", cells_file(tmp_path, *rows), "--json", command=paper))
    assert [cell["error"] for cell in found["cells"]] == pytest.approx([0, -0.5, 1])
    assert (found["ttft"]["median"], found["ttft"]["max"]) == pytest.approx((0.5, 1))
    assert found["speedup"] == {"median": None, "p90": None, "max": None}
    assert "nothing to compare" in run("--score", cells_file(tmp_path, *rows), command=paper)


@pytest.mark.parametrize(
    ("row", "error", "words"),
    [
        ("T,GPT-5,4,4096,300,TSP,1", ConfigError, "'GPT-5'.*Llama 7B"),
        ("T,Llama 7B,4,4096,300,RING,1", DataError, "line 2.*'RING'.*base, TSP, KVR-E, KVR-S, KVR-P"),
        ("T,Llama 7B,4,4096,300,TSP,soon", DataError, "line 2.*ttft_s.*'soon'"),
        ("T,Llama 7B,4,4096,300,TSP,nan", DataError, "ttft_s.*finite"),
        ("T,Llama 7B,4,4096,300,TSP,0", DataError, "above 0"),
        ("T,Llama 7B,4,4096,-1,TSP,1", DataError, "link_gb_per_s"),
        ("T,Llama 7B,4,4096,0,TSP,1", DataError, "between 4 GPUs"),
        ("T,Llama 7B,4,3,300,TSP,1", DataError, "3 tokens"),
        ("T,Llama 7B,4,4096,300", DataError, "method"),
    ],
)
def test_cells_that_make_no_sense(tmp_path: Path, row: str, error: type[KvrError], words: str) -> None:
    with pytest.raises(error, match=words):
        run("--score", cells_file(tmp_path, row), command=paper)


def test_files_of_cells_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column ttft_s"):
        run("--score", cells_file(tmp_path, header=",".join(COLUMNS[:-1])), command=paper)
    with pytest.raises(DataError, match="no cells"):
        run("--score", cells_file(tmp_path), command=paper)
    with pytest.raises(DataError, match="no such file"):
        run("--score", tmp_path / "missing.csv", command=paper)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        run("--score", tmp_path / "binary.csv", command=paper)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--hardware", "b300"], "'b300'.*h100-80gb"),
        (["--model", "Llama 8B"], "'Llama 8B'.*Llama 3.1 8B"),
        (["--contexts", "1m"], "1048576 tokens.*131072.*Llama 3.1 8B 1M"),
        (["--contexts", "8", "--ranks", "9"], "9 ranks for 8 tokens.*at most 8"),
        (["--contexts", "0"], "--contexts '0'"),
        (["--ranks", "two"], "--ranks 'two'"),
        (["--ranks", ","], "--ranks"),
        (["--link-gigabytes-per-s", "-1"], "above 0"),
        (["--link-gigabytes-per-s", "nan"], "above 0"),
    ],
)
def test_what_cannot_be_simulated(args: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(*args)


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        run("--ranks", "1", "--contexts", "1k", "--json", tmp_path / "no" / "file.json")


def test_a_thousand_ranks_need_no_model_library() -> None:
    """What makes it quick: neither torch nor transformers nor scipy is imported for a named shape."""
    code = (
        "import sys; from kvr_mpi.schedule.simulate import look_out, simulate; "
        "found = look_out('Llama 3.1 8B 1M', None, None, None, bool); "
        "rows = simulate(found.work, found.costs, [1 << 20], [1024], relay=found.relay); assert len(rows) == 1, rows; "
        "print([name for name in ('torch', 'transformers', 'mpi4py', 'scipy', 'h5py') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


@pytest.mark.long
def test_a_benchmark_ends_with_the_exit_code_of_its_error() -> None:
    for words, code in ((["paper", "--no"], 2), (["paper", "--score", "none.csv"], 65)):
        ended = subprocess.run([sys.executable, "-m", "benchmarks", *words], capture_output=True, cwd=ROOT)
        assert ended.returncode == code, ended.stderr
