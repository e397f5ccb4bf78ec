"""Jobs planned, forecast and run from Python: what the commands give; and their results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from constants import ROOT
from made_corpora import write_lines
from made_runs import HEADER, NAMES, corpus_of, part_of, record, take, write, write_share
from transformers import AutoModelForCausalLM

import kvr_mpi
from kvr_mpi import KvrError, open_results
from kvr_mpi.api.jobs import read_job
from kvr_mpi.cli import group
from kvr_mpi.documents import CorpusPart, scan_corpus
from kvr_mpi.errors import EXIT_BAD_DATA, ConfigError, DataError, MissingError
from kvr_mpi.store.kv import CachedTokens
from kvr_mpi.store.writer import ResultWriter
from kvr_mpi.transport.local import LocalTransport, run_local


@pytest.fixture
def job(tmp_path: Path, tiny_model_dir: Path) -> dict[str, Any]:
    """A job over three documents, one of which cannot be read."""
    (tmp_path / "corpus").mkdir()
    for number in range(2):
        (tmp_path / "corpus" / f"doc-{number}.txt").write_text(f"Document {number}. " * (20 + 30 * number))
    (tmp_path / "corpus" / "bad.txt").write_bytes(b"\xff\xfe\xfd")
    return {
        "model": {"path": str(tiny_model_dir), "dtype": "float32"},
        "documents": {"path": str(tmp_path / "corpus")},
        "generation": {"max_new_tokens": 4},
        "parallel": {"partition": "even"},
        "output": {"path": str(tmp_path / "out"), "kv": True},
    }


def test_a_job_is_run_and_its_results_opened(job: dict[str, Any]) -> None:
    outcome = kvr_mpi.run(job, comm=LocalTransport())
    assert outcome.exit_code == EXIT_BAD_DATA and not outcome.is_complete
    found = outcome.open()
    assert found.ids("done") == ["doc-0.txt", "doc-1.txt"] and found.ids("error") == ["bad.txt"]
    record, kv = found["doc-1.txt"], found.kv("doc-1.txt")
    assert kv.token_ids is not None and len(kv.token_ids) == record.prompt_tokens + record.new_tokens - 1
    assert kv.layers[0][0].shape == (len(kv.token_ids), 2, 8)
    for resume in (False, True):
        assert kvr_mpi.run(job, comm=LocalTransport(), resume=resume).exit_code == EXIT_BAD_DATA
    assert [one.finished_at for one in outcome.open()] == [one.finished_at for one in found]
    spec = read_job(job)
    with pytest.raises(ConfigError, match="has already been read"):
        read_job(spec, ["generation.max_new_tokens=3"])
    changed = spec.model_copy(update={"decode": spec.decode.model_copy(update={"mode": "head-parallel"})})
    with pytest.raises(ConfigError, match="output.kv = true cannot be combined with decode.mode"):
        kvr_mpi.run(changed, comm=LocalTransport())
    with pytest.raises(ConfigError, match="choose one"):
        kvr_mpi.run(job, comm=LocalTransport(), resume=True, overwrite=True)


def test_ranks_run_it_together_and_fail_together(job: dict[str, Any], tmp_path: Path) -> None:
    settings = ["output.max_failed=1", f"output.path={tmp_path / 'both'}"]
    outcomes = run_local(2, lambda world: kvr_mpi.run(job, settings=settings, comm=world))
    assert [one.exit_code for one in outcomes] == [0, 0] and outcomes[1].is_complete
    assert len(outcomes[1].open()) == 3

    def rank(world: LocalTransport) -> str:
        with pytest.raises(KvrError) as caught:
            kvr_mpi.run({**job, "model": {"path": str(tmp_path / "nowhere")}}, comm=world)
        return str(caught.value)

    first, second = run_local(2, rank)
    assert "no such file or folder" in first and second == "another rank failed"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_was_interrupted_is_resumed_in_the_same_process(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ResultWriter, "write", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(error):
            kvr_mpi.run(job, comm=LocalTransport())
    assert len(kvr_mpi.run(job, comm=LocalTransport(), resume=True).open()) == 3


def test_a_plan_is_that_of_the_command(job: dict[str, Any]) -> None:
    made = kvr_mpi.plan(job, 4, "h200")
    assert made.schedule.ranks == 4
    assert {place.id for place in made.schedule.placements} == {"bad.txt", "doc-0.txt", "doc-1.txt"}
    with pytest.raises(ConfigError, match="ranks = 0"):
        kvr_mpi.plan(job, 0, "h200")
    with pytest.raises(ConfigError, match="the job given: unknown key 'document'"):
        kvr_mpi.plan({**job, "document": {"path": "x"}}, 4, "h200")


def test_a_forecast_is_that_of_the_command() -> None:
    rows = kvr_mpi.simulate("Llama 3.1 8B", "h200", ranks=[1], contexts=[8192])
    told = CliRunner().invoke(
        group, ["plan", "--tokens", "8k", "--model", "Llama 3.1 8B", "--hardware", "h200", "--ranks", "1", "--json"]
    )
    assert json.loads(told.output)["rows"] == json.loads(json.dumps([row.as_json() for row in rows]))
    for wrong in ({"ranks": []}, {"contexts": [0]}, {"link_gigabytes_per_s": -1.0}, {"hardware": "h3000"}):
        with pytest.raises(ConfigError):
            kvr_mpi.simulate("Llama 3.1 8B", **wrong)  # type: ignore[arg-type]


def continued(model_dir: Path, ids: Sequence[int], **options: Any) -> list[int]:
    """What plain transformers appends to these tokens."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    given = torch.tensor([[*ids]])
    made = model.generate(given, max_new_tokens=8, do_sample=False, **options)
    return made[0, given.shape[1] :].tolist()  # type: ignore[no-any-return]


def test_transformers_continues_from_stored_keys_and_values(job: dict[str, Any], tiny_model_dir: Path) -> None:
    """Through `to_cache`, and with h5py alone, by the script that docs/python.md shows; but not another model."""
    outcome = kvr_mpi.run(job, comm=LocalTransport())
    kv, record = outcome.open().kv("doc-1.txt"), outcome.open()["doc-1.txt"]
    assert kv.token_ids is not None and record.token_ids is not None
    ids = [*kv.token_ids, record.token_ids[-1]]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    wanted = continued(tiny_model_dir, ids)
    assert continued(tiny_model_dir, ids, past_key_values=kv.to_cache(model)) == wanted
    code = (ROOT / "docs" / "python.md").read_text().partition("```python\n# read_kv.py\n")[2].partition("```")[0]
    assert "import h5py" in code and "kvr_mpi" not in code
    words = [sys.executable, "-c", code, outcome.folder / "results.h5", "doc-1.txt", tiny_model_dir]
    assert json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout) == wanted
    with torch.no_grad():  # one weight is another: without the comparison it would continue with other tokens
        model.model.layers[1].self_attn.v_proj.weight.mul_(1.1)
    with pytest.raises(ConfigError, match="layer 1: the values"):
        kv.to_cache(model)
    with pytest.raises(ConfigError, match="2 layers"):
        replace(kv, layers={number: kv.layers[number] for number in (0, 1)}).to_cache(model)


@pytest.mark.slow
def test_the_example_runs_under_mpirun(tmp_path: Path, mpirun: Any, tiny_model_dir: Path) -> None:
    """The script that docs/python.md shows, word by word."""
    page = (ROOT / "docs" / "python.md").read_text()
    code = page.partition("```python\n# chain.py\n")[2].partition("```")[0]
    assert "MPI.COMM_WORLD" in code
    (tmp_path / "chain.py").write_text(code)
    (tmp_path / "text.txt").write_text("The ferry left at seven and the harbour was quiet. " * 20)
    done = mpirun(2, [sys.executable, "chain.py", tiny_model_dir, "text.txt"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 slices" in done.stdout and done.stdout.count("answer:") == 1


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    """As Python, in the order of its cells, beside a run where the demo's would be."""
    take(tmp_path / "runs" / "demo", corpus=corpus_of("abc")).lock.release()
    write(tmp_path / "runs" / "demo", 0, [record("a"), record("b", "error"), record("c")])
    book = json.loads((ROOT / "docs" / "results.ipynb").read_text())
    assert all(not cell.get("outputs") for cell in book["cells"]), "what it shows is of somebody's machine"
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(cells)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# Results, opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run over ten documents: eight done, one failed, one left."""
    take(tmp_path / "out", corpus=corpus_of(NAMES)).lock.release()
    names = [name for name in NAMES if name != "f"]
    write(tmp_path / "out", 0, [record(name, "error" if name == "b" else "done") for name in names], kv=True)
    return tmp_path / "out"


def test_records_are_read_in_order_and_filtered(folder: Path) -> None:
    found = open_results(folder)
    done = sorted(name for name in NAMES if name not in "bf")
    assert [each.id for each in found] == sorted([*done, "b"]) == found.ids() and len(found) == 9
    assert found.ids("done") == done and found.ids("error") == ["b"]
    assert [each.id for each in found.records("done", where=lambda each: each.answer.endswith("c"))] == ["c", "dir/c"]
    assert found["dir/c"].answer == "about dir/c" and "dir/c" in found and "f" not in found
    assert found.left == 1 and str(found) == f"8 done, 1 failed, 1 left in {folder}"
    assert found.header.model["name"] == "tiny"


def test_what_is_asked_for_wrongly_is_refused(folder: Path) -> None:
    found = open_results(folder)
    with pytest.raises(ConfigError, match=r"status 'failed': expected one of 'done', 'error'"):
        found.records("failed")  # which an empty answer would pass for "nothing failed"
    with pytest.raises(ConfigError, match=r"no document 'dirc' .*'dir/c'"):
        found["dirc"]
    with pytest.raises(ConfigError, match="at least one path"):
        open_results()
    with pytest.raises(MissingError, match="no such file or folder"):
        open_results(folder / "nowhere")


def test_keys_and_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    keys = torch.randn(300, 2, 8, generator=torch.Generator().manual_seed(1))
    layers = [(keys, -keys), None, (keys.bfloat16(), -keys.bfloat16())]
    (tmp_path / "out").mkdir()
    writer = ResultWriter(tmp_path / "out", 0, HEADER)
    writer.write(record("a"), layers, CachedTokens(tuple(range(300)), (1, 290)))
    writer.write(record("b"))
    writer.close()
    found = open_results(tmp_path / "out")
    kv = found.kv("a")
    assert (
        sorted(kv.layers) == [0, 2] and kv.token_ids == tuple(range(300)) and kv.text == (1, 290) and kv.tokens == 300
    )
    assert torch.equal(kv.layers[0][0], keys) and kv.layers[2][1].dtype == torch.bfloat16
    arrays = kv.numpy()
    assert arrays[2][0].dtype == np.float32 and np.array_equal(arrays[2][0], keys.bfloat16().float().numpy())
    assert sorted(found.kv("a", [2]).layers) == [2]
    with pytest.raises(ConfigError, match=r"no keys and values of layer 1; it has those of 2, 0 to 2"):
        found.kv("a", [0, 1])
    with pytest.raises(ConfigError, match=r"'b' has no keys and values: its run had output.kv = false"):
        found.kv("b")


def test_a_share_that_has_documents_left_is_refused(tmp_path: Path) -> None:
    for number in (0, 2):
        write_share(tmp_path, number, 3, NAMES)
    take(tmp_path / "share-1-of-3", corpus=part_of(NAMES, 1, 3)).lock.release()
    write(tmp_path / "share-1-of-3", 0, [record(NAMES[1])])
    with pytest.raises(DataError, match=r"share-1-of-3 has \d of \d documents left"):
        open_results(tmp_path)


def test_shares_that_do_not_belong_together_are_refused_saying_what_differs(tmp_path: Path) -> None:
    """A document that came between two tasks would be in nobody's share, and nobody would notice."""
    write_share(tmp_path, 0, 2, NAMES)
    write_share(tmp_path, 1, 2, [*NAMES, "new", "newer"])
    with pytest.raises(DataError, match="shares of different documents"):
        open_results(tmp_path, partial=True)


def test_shares_of_different_limits_are_refused(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", *({"id": name, "text": "x"} for name in NAMES))
    for number, limit in enumerate((3, None)):
        part = scan_corpus([str(rows)], limit=limit, part=CorpusPart(number, 2))
        take(folder := tmp_path / "out" / f"share-{number}-of-2", corpus=part).lock.release()
        write(folder, 0, map(record, part.ids()))
    with pytest.raises(DataError, match=r"documents\.limit"):
        open_results(tmp_path / "out", partial=True)


def test_a_share_of_nothing_is_not_missing(tmp_path: Path) -> None:
    for number in range(2):
        write_share(tmp_path, number, 3, "xy")
    take(tmp_path / "share-2-of-3", corpus=part_of("xy", 2, 3)).lock.release()
    assert open_results(tmp_path).ids() == ["x", "y"]
