"""What `run` logs: to Python's logging as the user has configured it, with rank and document, and to no other place."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import transformers

from kvr_mpi.api.ranks import leave_bars_to_rank_0
from kvr_mpi.cli.log_lines import quiet_libraries, show_log
from kvr_mpi.logs import EXIT, NAME, PROGRESS, RankLogger
from kvr_mpi.transport import Transport

BARS = "HF_HUB_DISABLE_PROGRESS_BARS"

PROGRAM = """
import logging, sys
import kvr_mpi
from kvr_mpi.transport.local import LocalTransport

form = "%(levelname)s|%(name)s|%(rank)s|%(document)s|%(message)s"
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter(form, defaults={"rank": None, "document": None}))
logging.basicConfig(level=logging.WARNING, handlers=[handler])
before = logging.getLogger("py.warnings").handlers[:]
model, corpus, out = sys.argv[1:]
job = {"model": {"path": model, "dtype": "float32"}, "documents": {"path": corpus}, "output": {"path": out},
       "generation": {"max_new_tokens": 2}}
kvr_mpi.run(job, comm=LocalTransport())
names = [name for name in logging.root.manager.loggerDict if name.startswith("kvr_mpi")]
assert not any(logging.getLogger(name).handlers for name in names), "handlers are the user's"
assert logging.getLogger("py.warnings").handlers == before and logging.root.handlers == [handler]
"""


@pytest.mark.slow
def test_a_program_sees_warnings_in_its_own_format_and_nothing_else(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "good.txt").write_text("The harbour was quiet. " * 9)
    (tmp_path / "corpus" / "bad.txt").write_bytes(b"\xff\xfe\xfd")
    command = [sys.executable, "-c", PROGRAM, tiny_model_dir, tmp_path / "corpus", tmp_path / "out"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "exit code" not in run.stderr, run.stderr
    logged = [line.split("|", 4) for line in run.stdout.splitlines() if "|kvr_mpi" in line]
    assert {line[0] for line in logged} == {"WARNING", "ERROR"}, "no line below the user's level"
    (failed,) = [line for line in logged if line[1] == PROGRESS]
    assert failed[0] == "WARNING" and failed[2:4] == ["0", "bad.txt"] and "bad.txt: error: " in failed[4]
    (last,) = [line for line in logged if line[1] == EXIT]
    assert last[0] == "ERROR" and last[4].startswith("exit code 65: ")


def test_records_carry_the_rank_and_other_ranks_leave_its_lines_to_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, NAME)
    for rank in range(2):
        RankLogger(rank).root.info("once")
        RankLogger(rank).warning("everywhere", extra={"document": f"{rank}.txt"})
        RankLogger(rank).only(False).error("never")
    seen = [(one.levelname, one.rank, getattr(one, "document", None)) for one in caplog.records]  # type: ignore[attr-defined]
    assert seen == [("INFO", 0, None), ("WARNING", 0, "0.txt"), ("WARNING", 1, "1.txt")]


def test_the_commands_show_python_warnings_as_one_line_and_levels_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    show_log("quiet", rank=3)
    quiet_libraries(rank=3)
    try:
        for logger in (RankLogger(3), RankLogger(3).named(EXIT)):
            logger.info("good news")
        RankLogger(3).warning("bad news\nof two lines")
        logging.getLogger("py.warnings").warning("%s", "file.py:1: UserWarning: slow\n  call()\n")
    finally:
        logging.captureWarnings(False)
        show_log()
    lines = [line.partition("] ") for line in capsys.readouterr().err.splitlines()]
    assert all(" rank 3 " in head for head, _, _ in lines)
    texts = [text for _, _, text in lines]
    assert texts[:3] == ["good news", "warning: bad news", "of two lines"] and len(texts) == 4
    assert texts[3].startswith("warning: Python: file.py:1: UserWarning: slow")


@pytest.mark.parametrize(("rank", "environ", "has_bars"), [(0, {}, True), (1, {}, False), (1, {BARS: "0"}, True)])
def test_one_rank_of_a_program_draws_progress_bars(rank: int, environ: dict[str, str], has_bars: bool) -> None:
    logging_of = transformers.logging
    before = logging_of.is_progress_bar_enabled()
    logging_of.enable_progress_bar()
    try:
        leave_bars_to_rank_0(cast("Transport", SimpleNamespace(rank=rank)), environ)
        assert logging_of.is_progress_bar_enabled() == has_bars
    finally:
        if not before:
            logging_of.disable_progress_bar()
