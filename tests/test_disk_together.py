"""Many processes replace the same file at once, as the tasks of an array do in a common cache."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

from kvr_mpi.disk import replacing

PROCESSES, TIMES = 16, 12


def replace_again_and_again(file: Path, number: int, start: Any, found: Any) -> None:
    """Write the file, and read whatever is there; send what went wrong."""
    start.wait()
    wrong = []
    for time in range(TIMES):
        try:
            with replacing(file) as stream:
                for _ in range(4):
                    stream.write(json.dumps([number, time] * 2000).encode() + b"\n")
                    stream.flush()
            lines = {*file.read_text().splitlines(keepends=True)}
            assert len(lines) == 1 and len(set(json.loads(lines.pop())[::2])) == 1
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")
    found.put(wrong)


def test_sixteen_processes_replace_one_file(tmp_path: Path) -> None:
    context, file = multiprocessing.get_context("fork"), tmp_path / "table.json"
    start, found = context.Event(), context.Queue()
    writers = [
        context.Process(target=replace_again_and_again, args=(file, number, start, found))
        for number in range(PROCESSES)
    ]
    for writer in writers:
        writer.start()
    start.set()
    wrong = [error for _ in writers for error in found.get(timeout=300)]
    for writer in writers:
        writer.join()
    assert not wrong
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
