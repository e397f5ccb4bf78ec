"""Other engines get the weights of the model, in their format; and the headline tables are made of parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from constants import ROOT
from made_gguf import made_gguf

from benchmarks.gguf_weights import FORMATS, dequantised_gguf
from benchmarks.headline import PARTS, main
from benchmarks.rivals import open_rival
from kvr_mpi.errors import ConfigError
from kvr_mpi.model import load_model

# In place of another engine's Python: it says what it was told, and answers with the number of prompts.
FAKE = f"""#!{sys.executable}
import json, sys
print(json.dumps({{"version": "7", "runs_in": " ".join(sys.argv[3:])}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    found = [[len(prompt)] for prompt in asked["prompts"]]
    print(json.dumps({{"seconds": 1, "cpu_s": 2, "tokens": found, "logprobs": [0.0] * len(found)}}), flush=True)
"""


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_for_other_engines_has_the_weights_of_a_job(form: str, tmp_path: Path) -> None:
    path = made_gguf("llama").write(tmp_path / "made.gguf")
    written = dequantised_gguf(path, tmp_path / "cache", form, "bfloat16")
    ours = load_model(str(path), dtype="bfloat16", device="cpu", cache_dir=tmp_path).model.state_dict()
    theirs = load_model(str(written), dtype="float32", device="cpu", cache_dir=tmp_path).model.state_dict()
    assert ours.keys() == theirs.keys()
    # Only float16 loses bits, of values below 6e-5.
    near = 2**-24 if form == "f16" else 0.0
    for name, weights in ours.items():
        torch.testing.assert_close(theirs[name], weights.float(), rtol=0.0, atol=near)


def test_an_engine_is_told_the_dtype_and_given_its_file(tmp_path: Path) -> None:
    path = made_gguf("llama").write(tmp_path / "made.gguf")
    for name in ("openvino", "vllm"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(FAKE)
        python.chmod(0o755)
    with open_rival("openvino", str(path), "bfloat16", 9, tmp_path, 1, tmp_path / "cache") as rival:
        assert (rival.version, rival.runs_in.split()[-3:]) == ("7", ["9", "1", "bfloat16"])
        assert Path(rival.runs_in.split()[0]).suffix == ".gguf" and "-in-f16-" in rival.runs_in
        assert rival.answer([[1, 2], [3]], 1, None).tokens == ((2,), (1,))
    with open_rival("vllm", str(path), "float32", 9, tmp_path, 1, tmp_path / "cache") as rival:
        assert (Path(rival.runs_in.split()[0]) / "config.json").is_file()
    with pytest.raises(ConfigError, match=r"llama\.cpp.*install_rivals"):
        with open_rival("llama.cpp", str(path), "float32", 9, tmp_path, 1, tmp_path):
            pass


def row(strategy: str, seconds: float, **others: Any) -> dict[str, Any]:
    base = {"strategy": strategy, "ours": "kvr-s", "context_tokens": 1024, "ttft_s": seconds, "runs_in": "bfloat16"}
    ratio = {"pairs": 2, "times_ours": seconds / 2, "times_ours_low": 0.5, "times_ours_high": 9.0, "slices": "600+424"}
    return base | ratio | {"error": 0.001, "version": ""} | others


def test_headline_tables_are_made_of_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts that have been measured are not measured again; one that failed says why, and is due again."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    if not commit:
        pytest.skip("not a clone")
    about = {"date": "2026-11-28", "commit": commit, "processor": "2 cores of a test", "versions": {"torch": "2"}}
    parts = {part.name: part for part in PARTS}
    found = {
        "smollm2": {"rows": [row("kvr-s", 2.0), row("openvino", 3.0, version="5")]},
        "smollm2-transformers": {"rows": [row("kvr-s", 4.0), row("single", 9.0)]},
        "smollm2-vllm": {"failed": "no wheel for this processor"},
    }
    for name, kept in found.items():
        assert parts[name].dtype == "bfloat16"
        (tmp_path / f"{name}.json").write_text(json.dumps(about | kept))
    assert main(["--folder", str(tmp_path), "--no-store", "--minutes", "0"]) == 0
    said = capsys.readouterr().out
    lines = [line.split(" | ") for line in said.splitlines() if " | " in line]
    assert [(line[1], float(line[3])) for line in lines] == [("kvr-mpi", 3.0), ("OpenVINO", 3.0), ("transformers", 9.0)]
    assert "no wheel for this processor" in said
    main(["--folder", str(tmp_path), "--list"])
    listed = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in listed if line.endswith(": measured")} == {"smollm2", "smollm2-transformers"}
