"""What may be written where: no command hides, mixes, deletes or replaces results of a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from constants import Kvr
from made_runs import corpus_of, record, take, write, write_share

from kvr_mpi.cli.ask import _answers_folder
from kvr_mpi.errors import EXIT_CONFIG, EXIT_OK, OutputError
from kvr_mpi.store.lock import this_process
from kvr_mpi.store.results import open_results
from kvr_mpi.store.targets import answers_folders, check_file, check_output_folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    take(tmp_path / "run", corpus=corpus_of("abcd")).lock.release()
    write(tmp_path / "run", 0, map(record, "abcd"))
    return tmp_path / "run"


@pytest.fixture
def array(tmp_path: Path) -> Path:
    for number in range(2):
        write_share(tmp_path / "array", number, 2, "abcd")
    return tmp_path / "array"


def test_a_run_that_is_read_is_not_written_to(run: Path, array: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "all.h5").touch()
    log = next(run.glob("log-*"))
    for read, output in (
        (run, run),
        (run, tmp_path / "x" / ".." / "run"),
        (run, tmp_path / "link"),
        (tmp_path / "link", run),
        (log, run),
        (run, run / "answers"),
        (log, run / "answers"),
        (array, array / "share-0-of-2"),
        (array, array / "answers"),
        (array / "share-0-of-2", array / "share-0-of-2"),
        (tmp_path / "all.h5", tmp_path),
    ):
        with pytest.raises(OutputError, match="choose another output folder"):
            check_output_folder(output, [read])
    for read, output in ((run, tmp_path / "run-answers"), (tmp_path / "all.h5", tmp_path / "all-answers")):
        check_output_folder(output, [read, tmp_path / "nowhere"])


def test_a_folder_is_a_run_or_holds_runs(run: Path, array: Path) -> None:
    for output in (run / "inner", run / "deep" / "inner", array):
        with pytest.raises(OutputError, match="of (another run|other runs)"):
            check_output_folder(output)
    check_output_folder(run)
    check_output_folder(array / "share-0-of-2")
    (run.parent / "holder" / "project").mkdir(parents=True)
    (run.parent / "holder" / "project" / "run.json").write_text('{"name": "somebody else\'s"}')
    check_output_folder(run.parent / "holder")
    check_output_folder(run.parent / "holder" / "project" / "run")


def test_answers_go_beside_the_run(run: Path, array: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, file = f"{run}-answers", next(run.glob("log-*"))
    (array / "all.h5").touch()
    (run.parent / "all.h5").touch()
    monkeypatch.chdir(run)
    for path in (run, Path("."), Path("../run/"), file, Path(file.name)):
        assert answers_folders(path) == [wanted]
    assert answers_folders(array) == answers_folders(array / "all.h5") == [f"{array}-answers"]
    assert answers_folders(run.parent / "all.h5") == [str(run.parent / "all-answers")]


def test_other_questions_go_to_a_new_folder_and_the_last_one_is_continued(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{run}-answers", f"{run}-answers-2", f"{run}-answers-3"]
    assert _answers_folder(run, True) == names[0], "there is nothing to continue"
    for folder, job in zip(map(Path, names[:2]), ("6", "7"), strict=True):
        take(folder, owner=this_process(job)).lock.release()
    assert answers_folders(run) == names
    assert (_answers_folder(run, False), _answers_folder(run, True)) == (names[2], names[1])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for job, folder in (("6", names[2]), ("7", names[1])):  # a requeued job continues its own folder
        monkeypatch.setenv("SLURM_JOB_ID", job)
        assert _answers_folder(run, False) == folder


OWN = (
    *(
        "results.h5",
        "results.h5.part-0123456789abcdef",
        "run.json",
        "kv-0001-0000-00000.h5",
        "kv-9999-0000-00000.h5.damaged-1",
    ),
    *("log-0001-0000.jsonl", ".lock-000001", "trace/0001-0000.json"),
)


@pytest.mark.parametrize("name", OWN)
def test_no_command_writes_a_file_of_a_run(run: Path, run_kvr: Kvr, name: str) -> None:
    target = run / name
    target.parent.mkdir(exist_ok=True)
    target.exists() or target.write_text("as it was")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and ".lock" not in path.name}
    for command in ("report", "merge", "export"):
        code, _, err = run_kvr(command, run, "-o", target, "--overwrite")
        assert code == EXIT_CONFIG and "file of the run" in err, err
    assert {path: path.read_bytes() for path in before} == before


def test_a_file_is_replaced_only_if_asked_and_never_if_it_is_read(run: Path, tmp_path: Path, run_kvr: Kvr) -> None:
    target, merged = tmp_path / "document.txt", tmp_path / "all.h5"
    for command in ("report", "merge", "export"):
        target.write_text("a document")
        code, _, err = run_kvr(command, run, "-o", target)
        assert code == EXIT_CONFIG and "add --overwrite" in err and target.read_text() == "a document"
        assert run_kvr(command, run, "-o", target, "--overwrite")[0] == EXIT_OK
        assert target.read_bytes() != b"a document"
    for _ in range(2):  # the run's own page
        assert run_kvr("report", run)[0] == EXIT_OK
    assert [each.id for each in open_results(run)] == [*"abcd"]
    assert run_kvr("merge", run, "-o", merged)[0] == EXIT_OK
    before = merged.read_bytes()
    os.link(merged, tmp_path / "same.html")
    for name in ("all.h5", "same.html"):
        for command in ("report", "export"):
            code, _, err = run_kvr(command, merged, "-o", tmp_path / name, "--overwrite")
            assert code == EXIT_CONFIG and "is an input" in err
    assert merged.read_bytes() == before
    for path, words in ((tmp_path / "nowhere" / "file", "there is no folder"), (run, "is a folder")):
        with pytest.raises(OutputError, match=words):
            check_file(path, overwrite=True)
