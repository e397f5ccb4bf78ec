"""Other engines in `first-token`: what is refused, one that dies, and the real one (`benchmarks/install_rivals`)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from constants import ROOT, SMOLLM
from models import tiny

from benchmarks.first_token import Contest, bench
from benchmarks.pairs import Patience
from benchmarks.rivals import open_rival
from kvr_mpi.errors import ConfigError
from kvr_mpi.transport.local import LocalTransport


def environment(folder: Path, script: str) -> Path:
    """An environment whose Python is a script."""
    python = folder / "openvino" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("vllm", "model.gguf", "'vllm': expected some of openvino, llama.cpp"),
        ("openvino", "folder", "folder is not a .gguf file"),
        ("openvino", "model.gguf", "ended with 3: no such library"),
    ],
)
def test_an_engine_that_cannot_take_part_is_said_so(tmp_path: Path, name: str, model: str, words: str) -> None:
    folder = environment(tmp_path, "echo no such library >&2; exit 3")
    with pytest.raises(ConfigError, match=words), open_rival(name, Path(model), 100, folder):
        pass


def test_an_environment_that_is_not_there_is_said_how_to_make(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="`benchmarks/install_rivals` creates it"),
        open_rival("openvino", Path("a.gguf"), 9, tmp_path),
    ):
        pass


def test_an_engine_that_dies_at_work_is_said_so(tmp_path: Path) -> None:
    folder = environment(tmp_path, """echo '{"version": "1"}'; read line; echo out of memory >&2; exit 9""")
    with open_rival("openvino", Path("a.gguf"), 9, folder) as rival:
        assert rival.version == "1"
        for _ in range(2):  # and is still said so when it is asked again
            with pytest.raises(ConfigError, match="ended with 9: out of memory"):
                rival.answer([[1, 2]], 1, None)


def test_an_engine_that_fails_at_a_length_is_left_out_there(tmp_path: Path) -> None:
    folder = environment(tmp_path, """echo '{"version": "1"}'; read line; echo too long >&2; exit 1""")
    loaded, said = tiny("llama-gqa"), list[str]()
    contest = Contest(["kvr-e"], [16, 24], Patience(1, None, None))
    with open_rival("openvino", Path("a.gguf"), 99, folder) as rival:
        rows = bench(loaded, LocalTransport(), contest, said.append, {"openvino": rival})
    assert [(row.strategy, row.context_tokens) for row in rows] == [("kvr-e", 16), ("kvr-e", 24)]
    assert sum("left out: --rivals openvino: it ended with 1: too long" in line for line in said) == 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["openvino", "llama.cpp"])
def test_an_engine_takes_part(name: str, tmp_path: Path, run_bench: Any) -> None:
    subprocess.run(["benchmarks/install_rivals"], cwd=ROOT, check=True, capture_output=True)
    command = ["first-token", "--model", SMOLLM, "--contexts", "256", "--strategies", "kvr-e", "--repeats", "1"]
    rivals = ["--rivals", name, "--rivals-folder", ROOT / ".rivals"]
    run = run_bench(2, *command, *rivals, "--json", tmp_path / "rows")
    assert run.returncode == 0, run.stderr
    ours, theirs = json.loads((tmp_path / "rows").read_text())
    assert (ours["strategy"], theirs["strategy"]) == ("kvr-e", name)
    assert theirs["pairs"] == 1 and theirs["ttft_s"] > 0 and theirs["cpu_s"] > 0 and theirs["peak_bytes"] > 1e8
    assert "the same first token as transformers" in theirs["exactness"]


@pytest.mark.long
def test_engines_answer_a_corpus_as_we_do(tmp_path: Path, run_bench: Any) -> None:
    subprocess.run(["benchmarks/install_rivals"], cwd=ROOT, check=True, capture_output=True)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(3):
        (corpus / f"{number}.txt").write_text("The ferry left at seven and the harbour was quiet. " * (3 + number))
    job = tmp_path / "job.toml"
    job.write_text(
        f"""
        [model]
        path = "{SMOLLM}"
        dtype = "float32"
        [documents]
        path = "{corpus}"
        [prompt]
        template = "Summarise: {{text}} Summary:"
        [generation]
        max_new_tokens = 8
        [output]
        path = "{tmp_path / "out"}"
        """
    )
    rivals = ["--rivals", "openvino,llama.cpp", "--rivals-folder", ROOT / ".rivals", "--repeats", "1"]
    command = ["corpus", job, "--ways", "chains", *rivals, "--json", tmp_path / "rows"]
    run = run_bench(2, *command, timeout_s=400)
    assert run.returncode == 0, run.stderr
    rows = {row["way"]: row for row in json.loads((tmp_path / "rows").read_text())}
    assert list(rows) == ["chains", "openvino", "llama.cpp"]
    for row in rows.values():
        assert row["documents"] == 3 and row["prompt_tokens"] == rows["chains"]["prompt_tokens"]
        assert 0 < row["new_tokens"] <= 24 and row["seconds"] > 0
    sampled = run_bench(2, *command, "--set", "generation.temperature=0.7")
    assert sampled.returncode == 78 and "other engines only decode greedily" in " ".join(sampled.stderr.split())
