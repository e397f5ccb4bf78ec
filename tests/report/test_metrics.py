"""Files that other programs read while a job runs: whole at any time, and right."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from made_runs import record

from kvr_mpi.report.log import Log
from kvr_mpi.report.metrics import HELP, ProgressFiles, as_prometheus
from kvr_mpi.report.progress import Progress

LINE = re.compile(r"# (HELP|TYPE) kvr_[a-z_]+ .+|kvr_[a-z_]+ -?\d+(\.\d+)?(e-?\d+)?")


def test_files_follow_the_job(tmp_path: Path) -> None:
    now, said = [1000.0], io.StringIO()
    files = ProgressFiles(tmp_path, print, clock=lambda: now[0])
    progress = Progress(Log(stream=said), 4, 400, deadline_s=2000.0, files=files, clock=lambda: now[0])
    progress.prefilled("a", 10, 0.1, prefilled=100)
    told = json.loads((tmp_path / "progress.json").read_text())
    assert (told["documents"], told["documents_done"], told["work_prefilled_share"]) == (4, 0, 0.25)
    assert told["left_s"] is None and told["wall_time_left_s"] == 1000
    now[0] += 1
    progress.document(record("a"), 1, 100, 100)
    assert json.loads((tmp_path / "progress.json").read_text()) == told, "not every second"
    now[0] += 9
    progress.document(record("b"), 2, 200, 200, 777)
    told = json.loads((tmp_path / "progress.json").read_text())
    assert told["tokens_done"] == 777
    assert told["left_s"] == pytest.approx(10) and told["written_at_s"] == 1010
    now[0] += 1
    progress.document(record("d"), 4, 400, 400)
    told = json.loads((tmp_path / "progress.json").read_text())
    assert (told["documents_done"], told["left_s"], told["work_done_share"]) == (4, 0, 1), "the last one at once"
    progress.end(0, 888)
    told = json.loads((tmp_path / "progress.json").read_text())
    assert told["tokens_done"] == 888, "of all ranks, whichever of them did the last document"
    lines = (tmp_path / "metrics.prom").read_text().splitlines()
    assert all(LINE.fullmatch(line) for line in lines) and "kvr_documents_done 4" in lines
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.prom", "progress.json"]


def test_what_is_not_known_is_left_out() -> None:
    assert set(told := as_prometheus(dict.fromkeys(HELP, None))) == {"\n"} and told == "\n"
    assert as_prometheus({"left_s": 1.5}).splitlines()[-1] == "kvr_left_seconds 1.5"


def test_a_job_goes_on_without_them(tmp_path: Path) -> None:
    said: list[str] = []
    files = ProgressFiles(tmp_path / "gone", said.append)
    for _ in range(3):
        files.write({"documents": 1}, at_once=True)
    assert len(said) == 1 and "progress.json" in said[0]


def test_a_job_writes_them_when_asked(tmp_path: Path, tiny_model_dir: Path, run_here: Any) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"id": "{name}", "text": "The ferry left."}}\n' for name in "abc"))
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
        [model]
        path = "{tiny_model_dir}"
        dtype = "float32"
        [documents]
        path = "{tmp_path}/rows.jsonl"
        [generation]
        max_new_tokens = 2
        [parallel]
        partition = "even"
        [output]
        path = "{tmp_path}/out"
        [report]
        metrics = true
        """
    )
    run = run_here(2, [path])
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert found["documents"] == 3 and len(found["ranks"]) == 2
    assert sum(rank["new_tokens"] for rank in found["ranks"]) == 6
    told = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert told["documents"] == told["documents_done"] == 3 and told["left_s"] == 0
    assert told["tokens_done"] == sum(rank["prompt_tokens"] + rank["new_tokens"] for rank in found["ranks"])
