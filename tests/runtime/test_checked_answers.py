"""Jobs compare answers with the whole document, and show what it lacks; earlier results have no such fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from constants import Kvr
from made_jobs import TEXT

NEEDLE = "Alice Cooper had paid 4711 crowns for the second boat on the fifth of May, 1999."
# A random model writes anything: a schema that allows one text makes it write this.
ANSWER = "Alice Cooper and Bob Dylan had paid 4711 crowns for the second boat in 1998"
SCHEMA = f"generation.json_schema={json.dumps({'enum': [ANSWER]})}"


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_answers_are_compared_with_the_whole_document(
    split: bool, run_job: Any, run_kvr: Kvr, documents: Callable[[dict[str, str]], str]
) -> None:
    given = {"with": f"{NEEDLE} {TEXT * 8}", "without": TEXT * 8, "empty": ""}
    text = documents(given)
    more = ["prompt.max_tokens=240", "prompt.too_long=split"] if split else []
    more += [text, SCHEMA, "generation.max_new_tokens=60", "output.max_failed=1"]
    ran = run_job(2, *more)
    found = ran.records
    assert found["with"].parts > 1 if split else found["with"].parts == 1
    flags = {name: [(one["kind"], one["text"]) for one in record.flags] for name, record in found.items()}
    assert flags == {
        "with": [("name", "Bob Dylan"), ("number", "1998")],
        "without": [("name", "Cooper"), ("name", "Bob Dylan"), ("number", "4711"), ("number", "1998")],
        "empty": [],
    }
    assert [found[name].unsupported_count for name in ("with", "without", "empty")] == [2, 4, None]
    (copied,) = found["with"].copies
    assert found["with"].answer[copied["start"] : copied["stop"]] == "had paid 4711 crowns for the second boat"
    where = slice(copied["document_start"], copied["document_stop"])
    assert given["with"][where] == "had paid 4711 crowns for the second boat"
    assert "[Bob Dylan?] had paid 4711" in run_kvr("inspect", ran.folder, "with")[1]
    rows = [json.loads(line) for line in run_kvr("export", ran.folder)[1].splitlines()]
    assert [row["unsupported_count"] for row in rows] == [None, 2, 4]
    assert (
        run_kvr("export", ran.folder, "--format", "csv", "--fields", "id,unsupported_count,marked")[1].count("?]") == 6
    )

    off = run_job(1, *more, "output.check_answers=false", to="off")
    assert {name: (one.answer, one.unsupported_count) for name, one in off.records.items()} == {
        name: (one.answer, None) for name, one in found.items()
    }
    # Earlier runs, which have compared nothing, are continued.
    assert run_job(1, *more, to="off", words=["--resume", "--retry-failed"]).records["with"].unsupported_count is None
