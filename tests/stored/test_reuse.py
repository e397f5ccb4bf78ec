"""Prompts that begin like stored ones: the same answers, with only the rest computed, over chains too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import h5py
import pytest
from made_jobs import TEXT
from made_runs import kv_in

from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.stored_kv import BLOCK_TOKENS
from kvr_mpi.stored.reuse import hash_blocks

MORE = "And then the harbour master wrote a second letter, which nobody answered. "


def options(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def records(folder: Path) -> dict[str, Record]:
    return {record.id: record for record in open_results(folder)}


@pytest.fixture
def grown(job: Path, tmp_path: Path, run_here: Any) -> Path:
    """A run with keys and values, whose documents have grown since; one is new, and begins like another."""
    corpus = tmp_path / "corpus"
    (corpus / "doc-3.txt").write_text("The third. " + TEXT * 14)
    (corpus / "doc-4.txt").write_text("The fourth. " + TEXT * 17)
    done = run_here(
        2, [job, *options("output.kv=true", "generation.max_new_tokens=2", f"output.path={tmp_path / 'old'}")]
    )
    assert done.returncode == 0, done.stderr
    for name in ("doc-1.txt", "doc-3.txt"):
        (corpus / name).write_text((corpus / name).read_text() + MORE * 3)
    fourth = (corpus / "doc-4.txt").read_text()
    (corpus / "new.txt").write_text(fourth[: len(fourth) * 9 // 10] + MORE * 4)
    return tmp_path / "old"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, ()),
        pytest.param(2, (), marks=pytest.mark.slow),
        (3, ("parallel.partition=equal_time",)),
        pytest.param(2, ("parallel.strategy=ring",), marks=pytest.mark.slow),
    ],
)
def test_answers_are_the_same_and_only_the_rest_is_computed(
    job: Path, tmp_path: Path, run_here: Any, grown: Path, ranks: int, more: tuple[str, ...]
) -> None:
    plain = run_here(1, [job])
    assert plain.returncode == 0, plain.stderr
    again = options(f"documents.reuse={grown}", f"output.path={tmp_path / 'again'}", *more)
    reused = run_here(ranks, [job, *again])
    assert reused.returncode == 0, reused.stderr
    assert "with one of 5 stored prompts" in reused.stderr
    truth, found = records(tmp_path / "out"), records(tmp_path / "again")
    assert len(found) == 6 and found.keys() == truth.keys()
    for name, record in found.items():
        assert record.token_ids == truth[name].token_ids, name
        assert record.prompt_tokens == truth[name].prompt_tokens == truth[name].computed_tokens
    known = {name: record.prompt_tokens - record.computed_tokens for name, record in found.items()}
    assert known == {"doc-0.txt": 0, "doc-1.txt": 0, "doc-2.txt": 0, "doc-3.txt": 256, "doc-4.txt": 256, "new.txt": 256}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_damaged_beginning_is_an_error_record_and_the_chain_goes_on(
    job: Path, tmp_path: Path, run_here: Any, grown: Path, ranks: int
) -> None:
    with h5py.File(grown / "results.h5") as file:
        at = kv_in(file, "doc-3.txt")["layer_002/keys"].id.get_offset() + 100
    content = bytearray((grown / "results.h5").read_bytes())
    content[at] ^= 1
    (grown / "results.h5").write_bytes(content)
    reused = run_here(ranks, [job, *options(f"documents.reuse={grown}", "parallel.partition=even")])
    assert reused.returncode == 65, reused.stderr
    found = records(tmp_path / "out")
    assert {name for name, record in found.items() if record.status == "error"} == {"doc-3.txt"}
    assert "cannot be used" in found["doc-3.txt"].error and "layer_002/keys is damaged" in found["doc-3.txt"].error
    assert found["doc-4.txt"].status == "done" and found["doc-4.txt"].computed_tokens < found["doc-4.txt"].prompt_tokens


def test_another_models_beginnings_are_refused(job: Path, tmp_path: Path, run_here: Any, grown: Path) -> None:
    import transformers as tf

    other = Path(shutil.copytree(Path(str(job)).parent, tmp_path.parent / f"{tmp_path.name}-copy")) / "model"
    told = next(line for line in job.read_text().splitlines() if "path =" in line)
    shutil.copytree(told.split('"')[1], other)
    model = tf.AutoModelForCausalLM.from_pretrained(other)
    model.get_input_embeddings().weight.data[5] += 1
    model.save_pretrained(other)
    refused = run_here(2, [job, *options(f"documents.reuse={grown}", f"model.path={other}")])
    assert refused.returncode == 78 and "did not compute the keys and values" in refused.stderr
    refused = run_here(1, [job, *options(f"documents.reuse={tmp_path / 'nowhere'}")])
    assert refused.returncode == 65 and "nowhere" in refused.stderr


def test_a_blocks_hash_is_of_all_tokens_before() -> None:
    ids = list(range(3 * BLOCK_TOKENS + 5))
    hashes = hash_blocks(ids)
    assert len(hashes) == len(set(hashes)) == 3
    assert hash_blocks(ids[: 2 * BLOCK_TOKENS]) == hashes[:2] and hash_blocks(ids[:255]) == []
    assert hash_blocks([7, *ids[1:]])[2] != hashes[2] and hash_blocks([*ids[:-1], 7]) == hashes
