"""``forecast`` and ``paper``: forecasts, and the paper's cells."""

from __future__ import annotations

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
from benchmarks.paper_cells import paper_cells
from kvr_mpi.errors import ConfigError, ModelError, OutputError
from kvr_mpi.schedule.simulate import NAMES

STRATEGIES = {"single", "tsp-dense", "tsp-causal", "ring", "kvr-e", "kvr-s"}


def run(*args: str | Path, command: click.Command = forecast) -> str:
    result: Result = CliRunner().invoke(command, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_table_says_who_wins() -> None:
    lines = run("--ranks", "1,2", "--contexts", "8k").splitlines()
    assert "h100-80gb" in lines[0] and "not measured" in lines[0]
    assert [line.split()[:2] for line in lines[-2:]] == [["8192", "1"], ["8192", "2"]]
    assert lines[-1].split()[-1] == "kvr-s"
    names = next(line.split() for line in lines if line.split()[:2] == ["tokens", "ranks"])
    assert names[2:-3] == list(NAMES) and len(names) == len(lines[-1].split()), "a column each"


def test_json_holds_the_rows(tmp_path: Path) -> None:
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
    file = tmp_path / "rows.json"
    assert run(*args, "--json", file) == "" and json.loads(file.read_text()) == found


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


def test_plots(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    run("--ranks", "1,2,4", "--contexts", "4k,8k", "--plot", file)
    assert file.read_text().lstrip().startswith("<?xml")
    for name in ("plot.nonsense", "no/such/folder/plot.svg"):
        with pytest.raises(ConfigError, match="--plot"):
            run("--ranks", "2", "--contexts", "4k", "--plot", tmp_path / name)


def test_the_papers_cells_beside_the_models() -> None:
    lines = run(command=paper).splitlines()
    assert sum(line.startswith("Table ") for line in lines) == len(paper_cells())
    assert "time to first token (45): median" in lines[-2] and "KVR-S (20): median" in lines[-1]
    found = json.loads(run("--json", command=paper))
    assert set(found) == {"ttft", "speedup", "cells"}
    assert set(found["ttft"]) == set(found["speedup"]) == {"median", "p90", "max"}
    assert 0 < found["ttft"]["median"] < found["ttft"]["p90"] < found["ttft"]["max"]
    assert [cell["ttft_s"] for cell in found["cells"]] == [cell.ttft_s for cell in paper_cells()]


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
        "rows = simulate(found, [1 << 20], [1024]); assert len(rows) == 1, rows; "
        "print([name for name in ('torch', 'transformers', 'mpi4py', 'scipy', 'h5py') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


@pytest.mark.long
def test_a_benchmark_ends_with_the_exit_code_of_its_error() -> None:
    for words, code in ((["paper", "--no"], 2), (["forecast", "--hardware", "b300"], 78)):
        ended = subprocess.run([sys.executable, "-m", "benchmarks", *words], capture_output=True, cwd=ROOT)
        assert ended.returncode == code, ended.stderr
