"""What ranks say of themselves: read by whoever looks, and a rank that says nothing any more is noticed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_logs import logger_to
from made_runs import take

from kvr_mpi.cli import group
from kvr_mpi.disk import remove_rank_files
from kvr_mpi.events import Events, Totals
from kvr_mpi.logs import SILENT
from kvr_mpi.store.states import STATE_BYTES, RankState, StateWriter, read_states, silent_ranks
from kvr_mpi.store.status import read_status

STATE = RankState(0, 4, 1, "here", 1000.0, "prefilling", 1100.0, None, 5.0, 1100.0, "a.txt", 10, 2)


@contextmanager
def writers(folder: Path, count: int, **more: Any) -> Iterator[list[Events]]:
    """Write the states of so many ranks, with these events."""
    given = {"session": 1, "deadline_s": None, "logger": SILENT, **more}
    with ExitStack() as stack:
        found = [Events() for _ in range(count)]
        for rank, events in enumerate(found):
            stack.callback(StateWriter(folder, rank, count, **given, events=events).close)
        yield found


def test_ranks_say_what_they_are_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvr_mpi.store.states.EVERY_S", 0.05)
    run = take(tmp_path)
    with writers(tmp_path, 2, deadline_s=time.time() + 3600) as (first, second):
        first.begin("prefilling", "a\x1b[2J.txt")
        second.totals = Totals(prompt_tokens=1000, new_tokens=20, prefilled=3)
        second.begin("decoding", "3 answers")
        deadline = time.monotonic() + 300
        while {each.doing for each in read_status(tmp_path).ranks} != {"prefilling", "decoding"}:
            assert time.monotonic() < deadline
        time.sleep(0.2)
        told = CliRunner().invoke(group, ["status", str(tmp_path)]).output
        assert "1 prefilling, 1 decoding" in told and "rank 1    decoding 3 answers, " in told and "\x1b" not in told
        assert "\nprefilled 3 prompts since this job started" in told
        assert "answer tokens/s" in told and "left until the end of the batch job" in told and "SILENT" not in told
        (one, other) = json.loads(CliRunner().invoke(group, ["status", str(tmp_path), "--json"]).output)["ranks"]
        assert one["what"] == "a\x1b[2J.txt" and (other["prompt_tokens"], other["new_tokens"]) == (1000, 20)
    assert {each.doing for each in read_states(tmp_path, 1)} == {"ended"}
    run.lock.release()
    assert read_status(tmp_path).ranks == () == read_states(tmp_path, 2), "nobody is at work"
    remove_rank_files(tmp_path / "states")
    assert not (tmp_path / "states").exists()


def test_a_rank_that_has_gone_silent_is_named_first(tmp_path: Path) -> None:
    run = take(tmp_path)
    with writers(tmp_path, 4, tensor_parallel=2) as found:
        found[2].totals = Totals(prompt_tokens=1000, new_tokens=10, prefilled=2)
        states = read_states(tmp_path, 1)
        assert [state.name for state in states][1:3] == ["rank 1 (group 0.1)", "rank 2 (group 1.0)"]
        assert [state.is_first_of_group for state in states] == [True, False, True, False]
        gone = tmp_path / "states" / "0001-0001.json"
        before_s = {"began_s": states[1].began_s - 99, "written_at_s": states[1].written_at_s - 95}
        said = replace(states[1], doing="prefilling", what="b.txt", **before_s)
        gone.write_text(json.dumps(asdict(said)).ljust(STATE_BYTES))
        assert read_status(tmp_path).silent == (1,)
        told = CliRunner().invoke(group, ["status", str(tmp_path)]).output.splitlines()
        head = told.index("ranks     3 starting, 1 SILENT")
        assert told[head + 1].startswith("rank 1 (group 0.1)") and "last seen prefilling b.txt" in told[head + 1]
        gone.unlink()
        assert read_status(tmp_path).silent == (), "it may be about to begin"
    run.lock.release()


def test_stamps_are_held_against_each_other() -> None:
    late = replace(STATE, rank=1, written_at_s=1079.0)
    ended = replace(STATE, rank=2, doing="ended", written_at_s=1001.0)
    assert silent_ranks([STATE, late, ended]) == (1, 3), "rank 3 has never been heard of"
    assert silent_ranks([STATE, replace(late, written_at_s=1081.0), ended]) == (3,)
    assert silent_ranks([STATE, replace(late, every_s=10.0), ended]) == (3,), "it writes less often"
    young = [replace(each, began_s=1090.0) for each in (STATE, ended)]
    assert silent_ranks(young) == () == silent_ranks([])


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 1}, {"rank": -1}, {"size": 0}, {"size": 1 << 40}, {"session": 2}, {"host": 5}, {"every_s": 0.0},
        {"deadline_s": "soon"}, {"every_s": float("inf")}, {"new_tokens": 1.5}, {"prompt_tokens": -1},
        {"since_s": 1e12}, {"tensor_parallel": 5}, "", "{}", "[" * 3000, "{",
    ],
)  # fmt: skip
def test_what_is_no_state_is_left_out(tmp_path: Path, change: dict[str, Any] | str) -> None:
    (tmp_path / "states").mkdir()
    path = tmp_path / "states" / "0001-0000.json"
    path.write_text(json.dumps(asdict(STATE)))
    assert read_states(tmp_path, 1) == (STATE,)
    path.write_text(change if isinstance(change, str) else json.dumps(asdict(STATE) | change))
    assert read_states(tmp_path, 1) == ()
    path.unlink()
    path.symlink_to("/dev/zero")
    assert read_states(tmp_path, 1) == ()


def test_a_job_goes_on_where_nothing_can_be_written(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "states").write_text("somebody's own")
    with writers(tmp_path, 1, logger=logger_to(said)) as (events,):
        events.begin("prefilling", "a")
    assert len(said) == 1 and "kvr status" in said[0] and (tmp_path / "states").read_text() == "somebody's own"
    (tmp_path / "states").unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "states").symlink_to("elsewhere")
    with writers(tmp_path, 1, logger=logger_to(said)):
        assert not list((tmp_path / "elsewhere").iterdir())
    assert len(said) == 2


def test_the_next_job_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    with writers(tmp_path, 2):
        pass
    (tmp_path / "states" / "notes.txt").write_text("mine")
    with writers(tmp_path, 1, session=2):
        remove_rank_files(tmp_path / "states", but_of=2)
        assert sorted(path.name for path in (tmp_path / "states").iterdir()) == ["0002-0000.json", "notes.txt"]
    remove_rank_files(tmp_path / "states")
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["notes.txt"]
