"""Keys and values as safetensors and back: the same bits, records and identity; what is damaged is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import record, stored_layers, take, write
from safetensors import safe_open
from safetensors.torch import save_file

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG, EXIT_OK
from kvr_mpi.store.folder import read_run
from kvr_mpi.store.kv import open_kv
from kvr_mpi.store.outputs import open_file, read_header
from kvr_mpi.store.tensors import _checksum


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    take(folder, mode="new").close()
    write(folder, "0000", [record("a"), record("dir/b c"), record("é")], kv=True)
    write(folder, "0001", [record("none"), record("e", "error")])
    return folder


def exported(run: Path, folder: Path, run_kvr: Any) -> list[Path]:
    code, out, err = run_kvr("export", run, "--kv", folder)
    assert code == EXIT_OK and err == "" and "3 document(s)" in out
    return sorted(folder.glob("*"))


def test_what_comes_back_is_what_went_out(run: Path, tmp_path: Path, run_kvr: Any) -> None:
    files = exported(run, tmp_path / "kv", run_kvr)
    assert [file.name for file in files] == ["%C3%A9.safetensors", "a.safetensors", "dir%2Fb c.safetensors"]
    with safe_open(files[1], framework="pt") as stored:  # as anybody reads it
        assert set(stored.keys()) == {f"layer_00{n}.{kind}" for n in (0, 2) for kind in ("keys", "values")} | {
            "token_ids"
        }
        assert stored.get_tensor("layer_002.keys").dtype == torch.float16
        assert stored.get_tensor("token_ids").tolist() == [7, 8, 9, 5]
    code, out, err = run_kvr("import", tmp_path / "kv", tmp_path / "back")
    assert code == EXIT_OK and err == "" and "3 document(s)" in out
    before = {one.id: one for one in read_run(run)}
    after = {one.id: one for one in read_run(tmp_path / "back")}
    assert after == {name: before[name] for name in ("a", "dir/b c", "é")}
    with open_file(run / "shard-0001-0000-00000.h5") as old, open_file(tmp_path / "back" / "results.h5") as new:
        assert read_header(old) == read_header(new)
        for key in ("a", "dir%2Fb c", "%C3%A9"):
            first, second = (stored_layers(file[f"documents/{key}"]) for file in (old, new))
            assert first.keys() == second.keys() == {0, 2}
            assert all(torch.equal(one, two) for n in first for one, two in zip(first[n], second[n], strict=True))
            assert open_kv(old[f"documents/{key}"]).tokens == open_kv(new[f"documents/{key}"]).tokens


def test_nothing_is_overwritten_unasked(run: Path, tmp_path: Path, run_kvr: Any) -> None:
    exported(run, tmp_path / "kv", run_kvr)
    code, _, err = run_kvr("export", run, "--kv", tmp_path / "kv")
    assert code == EXIT_CONFIG and "--overwrite" in err
    assert run_kvr("export", run, "--kv", tmp_path / "kv", "--overwrite")[0] == EXIT_OK
    code, _, err = run_kvr("import", tmp_path / "kv", run)
    assert code == EXIT_CONFIG and "earlier run" in err
    (tmp_path / "empty").mkdir()
    assert run_kvr("import", tmp_path / "empty", tmp_path / "new")[0] == EXIT_CONFIG


def rewritten(file: Path, **changes: Any) -> None:
    with safe_open(file, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        about = json.loads(stored.metadata()["kvr-mpi"])
    tensors |= {name: value for name, value in changes.items() if isinstance(value, torch.Tensor)}
    about |= {name: value for name, value in changes.items() if not isinstance(value, torch.Tensor)}
    text = json.dumps(about)
    save_file(tensors, file, metadata={"kvr-mpi": text, "xxh3_128": _checksum(text, tensors)})


@pytest.mark.parametrize(
    "changes",
    [
        {"record": {"id": "a", "status": "error"}},
        {"record": {"id": "a\u202e", "status": "done"}},
        {"record": {"id": "", "status": "done"}},
        {"record": {"status": "done"}},
        {"record": {"id": "é", "status": "done"}},
        {"record": 5},
        {"identity": {"model": "another"}},
        {"identity": None},
        {"text": [0, 99]},
        {"text": [3, 1]},
        {"text": "x"},
        {"token_ids": torch.arange(99)},
        {"layer_000.keys": torch.zeros(4, 2)},
        {"layer_000.keys": torch.zeros(3, 2, 8)},
        {"layer_000.keys": torch.zeros(4, 2, 8, dtype=torch.int32)},
        {"layer_9.keys": torch.zeros(4, 2, 8)},
        {"layer_999999999.keys": torch.zeros(4, 2, 8), "layer_999999999.values": torch.zeros(4, 2, 8)},
    ],
)
def test_files_that_somebody_changed_are_refused(
    run: Path, tmp_path: Path, run_kvr: Any, changes: dict[str, Any]
) -> None:
    exported(run, tmp_path / "kv", run_kvr)
    rewritten(tmp_path / "kv" / "a.safetensors", **changes)
    code, _, err = run_kvr("import", tmp_path / "kv", tmp_path / "back")
    assert code == EXIT_BAD_DATA and ".safetensors" in err or "results.h5" in err, err
    assert not list((tmp_path / "back").glob("*.h5*"))


@pytest.mark.parametrize("at", [-1, -300, -700])
def test_a_flipped_bit_is_noticed(run: Path, tmp_path: Path, run_kvr: Any, at: int) -> None:
    """Safetensors files have no checksum: without ours it would be asked as if nothing had been."""
    exported(run, tmp_path / "kv", run_kvr)
    file = tmp_path / "kv" / "a.safetensors"
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    code, _, err = run_kvr("import", tmp_path / "kv", tmp_path / "back")
    assert code == EXIT_BAD_DATA and "checksum" in err and not list((tmp_path / "back").glob("*.h5*"))


def test_a_planted_link_is_not_followed(run: Path, tmp_path: Path, run_kvr: Any) -> None:
    (tmp_path / "kv").mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "kv" / "a.safetensors.part").symlink_to(victim)
    exported(run, tmp_path / "kv", run_kvr)
    assert victim.read_text() == "precious" and not (tmp_path / "kv" / "a.safetensors").is_symlink()


@pytest.mark.parametrize("cut", [0, 5, 200, -100])
def test_a_truncated_file_is_refused(run: Path, tmp_path: Path, run_kvr: Any, cut: int) -> None:
    exported(run, tmp_path / "kv", run_kvr)
    file = tmp_path / "kv" / "a.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    code, _, err = run_kvr("import", tmp_path / "kv", tmp_path / "back")
    assert code == EXIT_BAD_DATA and "a.safetensors is damaged" in err and "Traceback" not in err
