"""Jobs whose keys and values stay spread over the ranks: the answers of any other job, and nothing lost or mixed up."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from made_jobs import last_line
from made_runs import kv_in

from kvr_mpi import open_results
from kvr_mpi.store.record import Record
from kvr_mpi.store.volumes import key_of

SHARDED = ("output.kv=sharded", "prompt.max_tokens=400")


def options(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def records(folder: Path) -> dict[str, Record]:
    return {record.id: record for record in open_results(folder)}


def stored(folder: Path) -> dict[str, Any]:
    """Keys and values of every document, and whose they are."""
    found, results = {}, open_results(folder)
    for name in results.ids():
        with results.open(name) as (_, kv):
            found[name] = kv.tokens, {layer: kv.read(layer) for layer in kv.layers}
    return found


@pytest.fixture
def truth(job: Path, tmp_path: Path, run_here: Any) -> Path:
    """The same job on one rank, which keeps everything."""
    told = ("output.kv=true", SHARDED[1], f"output.path={tmp_path / 'truth'}")
    assert run_here(1, [job, *options(*told)]).returncode == 0
    return tmp_path / "truth"


@pytest.fixture
def unmerged(monkeypatch: pytest.MonkeyPatch, truth: Path) -> None:
    """From now on runs are too large to be put together at their end."""
    monkeypatch.setattr("kvr_mpi.store.rewrite.MERGE_MAX_BYTES", 0)


def check_only_own(folder: Path) -> None:
    """Every rank has written its slice of a document, once, into a volume of its own."""
    results, written = open_results(folder), Counter[str]()
    for volume in folder.glob("kv-*.h5"):
        with h5py.File(volume) as file:
            written.update(list(file["kv"]))
    for name, place in results.index.places.items():
        record, pieces = results[name], place.pieces
        assert len(pieces) == len({piece.path for piece in pieces}) == max(1, len(record.slices) - 1)
        with results.open(name) as (_, kv):
            starts = [row[0].first_token for row in kv.pieces]
            assert starts == list(record.slices[: len(pieces)])
    assert written == Counter(key_of(piece) for place in results.index.places.values() for piece in place.needs)


def check_same(folder: Path, truth: Path) -> None:
    found, wanted = records(folder), records(truth)
    assert {name: record.token_ids for name, record in found.items()} == {
        name: record.token_ids for name, record in wanted.items()
    }
    here, there = stored(folder), stored(truth)
    assert here.keys() == there.keys()
    for name, (tokens, layers) in here.items():
        assert tokens == there[name][0] and tokens.first == 0
        assert layers.keys() == there[name][1].keys()
        for number, pair in layers.items():
            for own, other in zip(pair, there[name][1][number], strict=True):
                torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (3, ("parallel.partition=equal_time",)),
        pytest.param(4, ("parallel.ranks_per_chain=2",), marks=pytest.mark.slow),
        pytest.param(1, (), marks=pytest.mark.long),
    ],
)
def test_the_answers_and_keys_of_one_rank(
    job: Path, tmp_path: Path, truth: Path, run_here: Any, ranks: int, more: tuple[str, ...]
) -> None:
    """And what is put together says nothing of how it was cut."""
    done = run_here(ranks, [job, *options(*SHARDED, *more)])
    assert done.returncode == 0, done.stderr
    check_same(tmp_path / "out", truth)
    assert not list((tmp_path / "out").glob("kv-*.h5"))
    assert all(
        len(record.slices) == (2 if "chain" in str(more) else ranks) + 1
        for record in records(tmp_path / "out").values()
    )


@pytest.mark.slow
def test_prefill_only_sampling_and_texts_that_are_split(job: Path, tmp_path: Path, run_here: Any) -> None:
    """Whatever else a job asks for, it is as without shards."""
    for number, more in enumerate(
        (
            ("generation.max_new_tokens=0",),
            ("generation.temperature=0.9", "generation.seed=3"),
            ("prompt.max_tokens=120", "prompt.too_long=split", "generation.max_new_tokens=4"),
        )
    ):
        folders = tmp_path / f"whole-{number}", tmp_path / f"sharded-{number}"
        for folder, kv in zip(folders, ("true", "sharded"), strict=True):
            done = run_here(2, [job, *options(*more, f"output.kv={kv}", f"output.path={folder}")])
            assert done.returncode == 0, done.stderr
        check_same(folders[1], folders[0])


@pytest.mark.usefixtures("unmerged")
@pytest.mark.parametrize("kv", ["true", pytest.param("sharded", marks=pytest.mark.long)])
@pytest.mark.slow
def test_what_every_rank_wrote_of_its_own_is_read_as_one(
    job: Path, tmp_path: Path, truth: Path, run_here: Any, run_kvr: Any, tiny_model_dir: Path, kv: str
) -> None:
    """Asked, exported, read from Python, gone on from and put together: as if one rank had written it all."""
    out = tmp_path / "out"
    own = f"output.kv={kv}", SHARDED[1]
    assert run_here(3, [job, *options(*own)]).returncode == 0
    files = sorted(out.glob("kv-*.h5"))
    cut = {record.id for record in open_results(out) if len(record.slices) > 2}  # others are too short for a chain
    assert len(files) >= 2 and len(cut) >= 2
    asking = tmp_path / "ask.toml"
    asking.write_text(
        f"""
        model.path = "{tiny_model_dir}"
        documents.path = "{out}"
        questions.ask = ["Who?"]
        output.path = "{tmp_path / "asked"}"
        """
    )
    check_only_own(out)
    asked = run_here(2, [asking])
    assert asked.returncode == 0, asked.stderr
    answers = {name: record.token_ids for name, record in records(tmp_path / "asked").items()}
    assert max(record.computed_tokens for record in records(tmp_path / "asked").values()) < 40
    wanted = run_here(1, [asking, *options(f"documents.path={truth}"), "--overwrite"])
    assert wanted.returncode == 0, wanted.stderr
    assert answers == {name: record.token_ids for name, record in records(tmp_path / "asked").items()}
    found, other = open_results(out), open_results(truth)
    for name in found.ids():
        here, there = found.kv(name), other.kv(name)
        assert here.token_ids == there.token_ids and here.text == there.text
        for number, pair in here.layers.items():
            torch.testing.assert_close(pair, there.layers[number], rtol=1e-4, atol=1e-4)
    again = run_here(2, [job, *options(*own), "--resume"])
    assert again.returncode == 0 and "5 of them already done" in again.stderr
    code, _, said = run_kvr("merge", out)
    assert code == 0, said
    assert not list(out.glob("kv-*.h5"))
    check_same(out, truth)


@pytest.mark.usefixtures("unmerged")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_part_that_is_lost_is_made_again(
    job: Path, tmp_path: Path, truth: Path, run_here: Any, run_kvr: Any, ranks: int
) -> None:
    """Whole documents are done again, on any number of ranks; never is one put together of what is left."""
    out = tmp_path / "out"
    assert run_here(3, [job, *options(*SHARDED)]).returncode == 0
    lost = min(out.glob("kv-*.h5"))
    lost.unlink()
    code, _, said = run_kvr("merge", out)
    assert code == 65 and "lost keys and values" in said
    again = run_here(ranks, [job, *options(*SHARDED), "--resume"])
    assert again.returncode == 0 and f"{lost.name} is gone" in again.stderr
    assert run_kvr("merge", out)[0] == 0
    check_same(out, truth)


@pytest.mark.parametrize(
    ("kind", "ranks", "more"),
    [
        ("llama-gqa", 4, ("parallel.chunk_tokens=32",)),
        ("mistral-window", 3, ()),
        ("gemma2-softcap", 2, ()),
        ("llama4-chunks", 3, ()),
        ("bloom-own-attention", 3, ()),
        ("deepseek-latents", 2, ()),
        ("llama-gqa", 3, ("parallel.strategy=ring",)),
        ("llama-gqa", 2, ("generation.max_new_tokens=0",)),
    ],
)
@pytest.mark.long
def test_ranks_that_write_their_own_store_what_one_would(
    job: Path, tmp_path: Path, run_here: Any, model_of: Any, kind: str, ranks: int, more: tuple[str, ...]
) -> None:
    """Of layers with windows all tokens, too, though the rank that decodes is sent only what it sees."""
    own = (f"model.path={model_of(kind)}", "output.kv=true", SHARDED[1])
    alone = [one for one in more if not one.startswith("parallel.")]
    done = run_here(1, [job, *options(*own, *alone, f"output.path={tmp_path / 'one'}")])
    assert done.returncode == 0, done.stderr
    done = run_here(ranks, [job, *options(*own, *more)])
    assert done.returncode == 0, done.stderr
    check_same(tmp_path / "out", tmp_path / "one")


@pytest.mark.usefixtures("unmerged")
@pytest.mark.slow
def test_a_damaged_part_is_never_used(job: Path, tmp_path: Path, truth: Path, run_here: Any, run_kvr: Any) -> None:
    out = tmp_path / "out"
    assert run_here(2, [job, *options("output.kv=true", SHARDED[1])]).returncode == 0
    path = min(out.glob("kv-*.h5"))
    with h5py.File(path) as file:
        dataset = next(iter(file["kv"].values()))["layer_001/values"]
        offset = dataset.id.get_offset()
        del dataset
    data = bytearray(path.read_bytes())
    data[offset + 5] ^= 4
    path.write_bytes(data)
    code, _, said = run_kvr("merge", out)
    assert code == 65 and "damaged" in said
    again = run_here(2, [job, *options("output.kv=true", SHARDED[1]), "--resume"])
    assert again.returncode == 0 and "is damaged" in again.stderr
    assert run_kvr("merge", out)[0] == 0
    check_same(out, truth)


def ask_sharded(folder: Path, model: Path, run: Path, name: str = "asked", tokens: int = 8) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(
        f"""
        model.path = "{model}"
        documents.path = "{run}"
        output.path = "{folder / name}"
        generation.max_new_tokens = {tokens}
        parallel.ranks_per_chain = "all"
        [questions]
        ask = ["Who wrote it, and what for?", "When?"]
        """
    )
    return path


@pytest.mark.parametrize("kind", ["llama-gqa", pytest.param("mistral-window", marks=pytest.mark.long)])
@pytest.mark.slow
def test_stored_documents_are_asked_by_all_ranks_together(
    job: Path, tmp_path: Path, run_here: Any, model_of: Any, kind: str
) -> None:
    """The answers of one rank that holds everything, however a document is shared out."""
    model, out = model_of(kind), tmp_path / "out"
    own = (f"model.path={model}", "prompt.max_tokens=400")
    assert run_here(2, [job, *options(*own, "output.kv=true")]).returncode == 0
    asking = ask_sharded(tmp_path, model, out)
    wanted = None
    for ranks, more in ((1, ("parallel.ranks_per_chain=1",)), (1, ()), (2, ()), (3, ())):
        done = run_here(ranks, [asking, *options(*more), "--overwrite"])
        assert done.returncode == 0, done.stderr
        found = records(tmp_path / "asked")
        answers = {name: record.token_ids for name, record in found.items()}
        wanted = wanted or answers
        assert len(answers) == 10 and answers == wanted
        assert all(record.computed_tokens < 40 for record in found.values())


@pytest.mark.slow
def test_a_damaged_share_is_an_error_record_and_nobody_waits(
    job: Path, tmp_path: Path, run_here: Any, tiny_model_dir: Path
) -> None:
    """One rank finds it; all go on to the next document."""
    out = tmp_path / "out"
    assert run_here(2, [job, *options("output.kv=true")]).returncode == 0
    with h5py.File(out / "results.h5", "r+") as file:
        kv_in(file, "doc-2.txt")["layer_001/keys"][3] += 1
    done = run_here(3, [ask_sharded(tmp_path, tiny_model_dir, out)])
    assert done.returncode == 65, done.stderr
    found = records(tmp_path / "asked")
    bad = {name for name, record in found.items() if record.status == "error"}
    assert bad == {"doc-2.txt#q1", "doc-2.txt#q2"} and "layer_001" in found["doc-2.txt#q1"].error


def test_what_it_does_not_go_with(job: Path, run_here: Any) -> None:
    refused = run_here(2, [job, *options("output.kv=shards")])
    assert refused.returncode == 78 and "'sharded'" in refused.stderr


def test_bad_documents_stop_nothing(job: Path, tmp_path: Path, run_here: Any) -> None:
    (tmp_path / "corpus" / "empty.txt").write_text("")
    (tmp_path / "corpus" / "short.txt").write_text("a")
    done = run_here(3, [job, *options(*SHARDED, "prompt.template={text}", "prompt.chat_template=false")])
    assert done.returncode == 65 and last_line(done.stderr).count("2 of 7 documents failed")
    found = records(tmp_path / "out")
    assert [record.status for record in found.values()] == ["done"] * 5 + ["error"] * 2
    assert "tokens cannot be spread over 3 ranks" in found["short.txt"].error


@pytest.mark.slow
def test_what_prompts_begin_with_may_be_stored(job: Path, tmp_path: Path, truth: Path, run_here: Any) -> None:
    """Beginnings that are loaded are in the first share, and the chain computes the rest."""
    (tmp_path / "corpus" / "doc-4.txt").write_text((tmp_path / "corpus" / "doc-4.txt").read_text() + "And then?")
    whole, sharded = tmp_path / "whole", tmp_path / "out"
    for folder, kv in ((whole, "true"), (sharded, "sharded")):
        told = (f"output.kv={kv}", SHARDED[1], f"documents.reuse={truth}", f"output.path={folder}")
        done = run_here(2, [job, *options(*told)])
        assert done.returncode == 0, done.stderr
    assert any(record.computed_tokens < record.prompt_tokens for record in records(sharded).values())
    check_same(sharded, whole)
