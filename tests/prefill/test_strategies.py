"""Jobs run by chains, rings, or whichever is forecast to be faster; and the registry all of it comes from."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import single
from click.testing import CliRunner
from made_jobs import TEXT, answers, with_settings
from made_tables import COSTS, a_table, an_entry, fitting
from models import prompt, tiny
from pipelines import Failing

from kvr_mpi.cli.plan import plan
from kvr_mpi.errors import DocumentError, ModelError
from kvr_mpi.kv.route import Route
from kvr_mpi.model import LayerShape, StateShape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.memory_budget import check_fits, footprint_of
from kvr_mpi.prefill.one_prompt import compute_prefix
from kvr_mpi.prefill.registry import KVR, MARGIN, STRATEGIES, candidates, fastest
from kvr_mpi.prefill.routes import ring
from kvr_mpi.store.results import open_results
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.tuning.table import save_table

RING = STRATEGIES["ring"]
HEAD = "prompt.template=" + "Read what follows with care, and say in one sentence what it is about. " * 3 + "{text}"
LENGTHS = [10, 12, 14, 0, 9, 15, 1, 11]


@pytest.fixture
def job(tmp_path: Path, tiny_model_dir: Path) -> Callable[[Sequence[int]], Path]:
    """Write a job over documents of these numbers of sentences, for a tiny model."""

    def write(sentences: Sequence[int]) -> Path:
        rows = (f'{{"id": "d{n:03d}", "text": "Document {n}. {TEXT * count}"}}\n' for n, count in enumerate(sentences))
        (tmp_path / "corpus.jsonl").write_text("".join(rows))
        settings = {
            "model.path": str(tiny_model_dir),
            "model.dtype": "float32",
            "documents.path": str(tmp_path / "corpus.jsonl"),
            "prompt.template": "Summarise: {text} Summary:",
            "generation.max_new_tokens": 6,
            "parallel.partition": "even",
            "output.path": str(tmp_path / "job"),
        }
        path = tmp_path / "job.toml"
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
        return path

    return write


@pytest.fixture
def expected(job: Callable[..., Path], tmp_path: Path, run_here: Any) -> dict[str, tuple[int, ...]]:
    run = run_here(2, [job(LENGTHS), *with_settings(f"output.path={tmp_path / 'chains'}")])
    assert run.returncode == 0, run.stderr
    assert {record.strategy for record in open_results(tmp_path / "chains")} == {"kvr"}
    return answers(tmp_path / "chains")


@pytest.mark.slow
def test_rings_answer_what_chains_answer(job: Any, expected: Any, tmp_path: Path, run_here: Any) -> None:
    path = job(LENGTHS)
    for ranks, setting in ((2, "all"), (3, "all"), (4, "2"), (2, "'auto'"), (1, "all")):
        settings = ("parallel.strategy=ring", f"parallel.ranks_per_chain={setting}")
        run = run_here(ranks, [path, "--overwrite", *with_settings(*settings)])
        assert run.returncode == 0, run.stderr
        assert answers(tmp_path / "job") == expected
        rings = 0
        for record in open_results(tmp_path / "job"):
            slices = len(record.slices) - 1
            assert record.strategy == ("kvr" if slices == 1 else "ring"), "a prompt on one rank is a chain of one"
            assert slices == 1 or slices % 2 == 0
            rings += slices > 1
        assert rings >= 5 or setting == "'auto'" or ranks == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_rings_over_real_ranks_keep_the_same_keys_and_values(
    ranks: int,
    job: Any,
    tmp_path: Path,
    mpirun: Any,
    run_here: Any,
    kvr_run: Path,
) -> None:
    """Instructions all share included: they are computed once, and each stretch attends to them."""
    path = job([12, 15, 0, 13])
    settings = (HEAD, "output.kv=true")
    one = run_here(1, [path, *with_settings(*settings, f"output.path={tmp_path / 'one'}")])
    run = mpirun(ranks, [kvr_run, path, *with_settings(*settings, "parallel.strategy=ring")])
    assert one.returncode == run.returncode == 0, run.stderr
    assert answers(tmp_path / "job") == answers(tmp_path / "one")
    assert "ring" in {record.strategy for record in open_results(tmp_path / "job")}
    alone, ring = open_results(tmp_path / "one"), open_results(tmp_path / "job")
    for name in alone.ids():
        for layer, pair in ring.kv(name).layers.items():
            for found, truth in zip(pair, alone.kv(name).layers[layer], strict=True):
                assert (found - truth).abs().max() < 1e-4


def test_rings_split_and_reduce(job: Any, tmp_path: Path, run_here: Any) -> None:
    path = job([60, 12])
    found = {}
    for strategy in ("kvr", "ring"):
        folder = tmp_path / strategy
        settings = (f"parallel.strategy={strategy}", "prompt.too_long=split", f"output.path={folder}")
        run = run_here(2, [path, *with_settings(*settings)])
        assert run.returncode == 0, run.stderr
        found[strategy] = answers(folder)
    assert found["ring"] == found["kvr"]
    # The parts went round; the prompt about their answers is short, and one rank's.
    (record,) = (record for record in open_results(tmp_path / "ring") if record.parts > 1)
    assert record.strategy in ("ring", "ring+kvr")


@pytest.mark.slow
def test_memory_that_is_full_begins_a_new_wave_of_rings(
    job: Any,
    tmp_path: Path,
    run_here: Any,
) -> None:
    path = job([10] * 7)
    free = run_here(2, [path, *with_settings(f"output.path={tmp_path / 'free'}")])
    tight = run_here(2, [path, *with_settings("parallel.strategy=ring", "parallel.memory_gib=0.0011")])
    assert free.returncode == tight.returncode == 0, tight.stderr
    assert answers(tmp_path / "job") == answers(tmp_path / "free")
    none = run_here(2, [path, "--overwrite", *with_settings("parallel.strategy=ring", "parallel.memory_gib=0.00002")])
    assert none.returncode == 65 and "does not fit: rank" in none.stderr


@pytest.mark.slow
def test_auto_takes_what_a_table_forecasts_to_be_faster(
    job: Any, expected: Any, tmp_path: Path, tiny_model_dir: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of 19 to 1 leave the second rank with nothing to do; on a slow link a ring waits in every layer."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the table says
    path = job(LENGTHS)
    uneven = [an_entry((0, tokens * 19 // 20, tokens)) for tokens in (128, 512)]
    best, slow = a_table(contexts=(128, 256, 512)), replace(COSTS, link_bytes_per_s=1e8)
    for chosen, changes in (("ring", {"entries": tuple(uneven)}), ("kvr", {"rates": slow})):
        table = best.model_copy(update=changes)
        save_table(fitting(table, tiny_model_dir), tmp_path / "table.json")
        settings = (f"partition={tmp_path / 'table.json'}", "strategy=auto")
        run = run_here(2, [path, "--overwrite", *with_settings(*(f"parallel.{setting}" for setting in settings))])
        assert run.returncode == 0, run.stderr
        assert answers(tmp_path / "job") == expected
        assert f"strategy = 'auto', on chains of 2 ranks: {chosen} (forecast for 506 tokens: kvr " in run.stderr
        assert {record.strategy for record in open_results(tmp_path / "job") if len(record.slices) > 2} == {chosen}


@pytest.mark.slow
def test_auto_measures_where_there_is_no_table(job: Any, expected: Any, tmp_path: Path, run_here: Any) -> None:
    path = job(LENGTHS)
    for ranks, setting in ((2, "all"), (3, "'auto'"), (1, "all")):
        settings = ("parallel.strategy=auto", f"parallel.ranks_per_chain={setting}", "parallel.partition=equal_time")
        run = run_here(ranks, [path, "--overwrite", *with_settings(*settings)])
        assert run.returncode == 0, run.stderr
        assert answers(tmp_path / "job") == expected
        used = {record.strategy for record in open_results(tmp_path / "job") if len(record.slices) > 2}
        said = [line for line in run.stderr.splitlines() if "strategy = 'auto', on chains of" in line]
        assert used <= {"kvr", "ring"} and (ranks == 1 or not used or said)
        assert ranks != 2 or (
            len(said) == 1 and all(name in said[0] for name in used) and "measured links" in run.stderr
        )


def test_a_tie_is_the_chains() -> None:
    assert fastest([1.0, 1.0 - MARGIN / 2]) == 0 and fastest([1.0, 1.0 - 2 * MARGIN]) == 1
    assert [one.name for one in candidates("auto")] == ["kvr", "ring"]
    assert [one.name for one in candidates("single")] == ["single"]


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2-softcap", "gpt-oss-sinks"])
def test_every_strategy_of_the_registry_is_exact_behind_a_prefix(name: str) -> None:
    """As jobs would run it, any rank last."""
    loaded, ids = tiny(name), prompt(61)
    truth = single(loaded, ids).logits
    prepare_model(loaded.model, chain=True)
    assert truth is not None
    for known in (0, 9):
        prefix = compute_prefix(loaded, ids[:known]) if known else None
        for strategy in STRATEGIES.values():
            if strategy.is_plain:
                continue
            cut = strategy.cut_evenly(61, 3, known)
            ranks = run_local(
                3,
                lambda rank: strategy.prefill(loaded, ids, cut, rank, prefix=prefix, last=1),  # noqa: B023
            )
            assert [rank.logits is not None for rank in ranks] == [False, True, False], strategy.name
            found = ranks[1].logits
            assert found is not None and ranks[1].strategy == strategy.name
            torch.testing.assert_close(found, truth, atol=1e-4, rtol=0)
            assert len(strategy.routes(cut, known)) == 3
            owned = [stretch for one in strategy.routes(cut, known) for stretch in one.owned]
            assert sum(stop - start for start, stop in owned) == 61 - known


def test_models_that_cannot_go_round_are_refused_by_name() -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    RING.check(loaded)
    whole = replace(loaded, attends_in_parts=False)
    with pytest.raises(
        ModelError, match=r"'ring': LlamaForCausalLM: its attention cannot be taken over in parts.*'kvr'"
    ):
        RING.check(whole)
    with pytest.raises(ModelError, match="cannot be taken over in parts"):
        RING.prefill(whole, prompt(12), RING.cut_evenly(12, 1), LocalTransport())
    KVR.check(whole)
    assert [one.name for one in candidates("auto", whole)] == ["kvr"]
    recurrent = LayerShape(states=(StateShape("recurrent", 0, (1, 6, 8, 8)),))
    state = replace(loaded, shape=replace(loaded.shape, layers=(recurrent, *loaded.shape.layers[1:])))
    with pytest.raises(ModelError, match="its recurrent layers"):
        RING.check(state)


def test_a_ring_that_answers_wrongly_is_found() -> None:
    def attend_to_one_neighbour(*args: Any, **options: Any) -> Route:
        route = ring(*args, **options)
        return replace(route, steps=route.steps[:1])

    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    wrong = replace(RING, make=attend_to_one_neighbour)
    with pytest.raises(ModelError, match="ring differ from those of one rank"):
        wrong.check(loaded)


def test_a_rings_memory_is_that_of_whole_buffers() -> None:
    loaded = tiny("llama-gqa")
    footprint = footprint_of(loaded.model.config, loaded.dtype)
    cut, kv_bytes = RING.cut_evenly(1000, 2), loaded.shape.kv_bytes_per_token
    decode_rank, other = (footprint.route_bytes(one, reserve_tokens=24) for one in RING.routes(cut))
    computed = footprint.activation_bytes(500)
    assert (decode_rank, other) == (1024 * kv_bytes + computed, 1000 * kv_bytes + computed)
    make = RING.make
    assert make is not None
    check_fits(footprint, cut, [decode_rank, other], 24, make)
    with pytest.raises(
        DocumentError, match=r"1000 tokens does not fit: rank 1 of 2 needs .*; [0-9]+ ranks would be enough"
    ):
        check_fits(footprint, cut, [decode_rank, other - 1], 24, make)


@pytest.mark.slow
def test_plans_name_the_strategy(job: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = job([15])
    monkeypatch.chdir(tmp_path)
    slow = {"name": "slow", "source": "invented", "attention": "flash", "gemm_flop_per_s": 1e9, "memory_bytes": 1e9}
    slow |= {"attention_flop_per_s": 1e9, "link_bytes_per_s": 1e9, "link_latency_s": 1e-5, "memory_bytes_per_s": 1e10}
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    for settings, name in (
        (("parallel.strategy=ring",), "ring"),
        (("parallel.strategy=auto", "parallel.partition=even"), "ring"),
        (("parallel.strategy=auto", "parallel.partition=equal_time"), "kvr"),
        ((), "kvr"),
        (("parallel.strategy=single",), "single"),
    ):
        options = with_settings(*settings)
        command = [str(path), "--ranks", "2", "--hardware", "slow.json", *options]
        found = json.loads(CliRunner().invoke(plan, [*command, "--json"], catch_exceptions=False).stdout)
        (row,) = found["documents"]
        assert (row["strategy"], len(row["slices"])) == (name, {"ring": 5, "kvr": 3, "single": 2}[name])
        assert name in CliRunner().invoke(plan, command, catch_exceptions=False).stdout


def test_a_rings_slices_are_even(job: Any, run_here: Any) -> None:
    settings = with_settings("parallel.strategy=ring", "parallel.partition=tables")
    run = run_here(2, [job([1]), *settings])
    assert run.returncode == 78 and "a ring's slices are even" in run.stderr


class Rendezvous(LocalTransport):
    """Sends end when they are received, as those of long messages do."""

    def isend(self, tensor: torch.Tensor, dest: int, tag: int, received: Any = None) -> Any:
        super().isend(tensor, dest, tag, received)
        return _Met(self._hub.mail[self.rank, dest, tag])


class _Met:
    def __init__(self, mailbox: Any) -> None:
        self.mailbox, self.message = mailbox, mailbox[-1]

    def test(self) -> bool:
        return all(message is not self.message for message in list(self.mailbox))


def test_a_ring_whose_ranks_all_run_out_of_memory_does_not_stand_still() -> None:
    """None of them has room for more than a few segments, and none can send before the next one receives."""
    loaded, ids = tiny("llama-gqa"), prompt(60)
    prepare_model(loaded.model, chain=True)
    mine = threading.local()

    def work(rank: LocalTransport) -> str | None:
        mine.rank, mine.fails = rank.rank, {each: -1 for each in range(5)}
        far = Rendezvous(rank._hub, rank.rank)
        cut = RING.cut_evenly(60, 5)
        return RING.prefill(loaded, ids, cut, far, last=2, spares_chain=True).error

    with Failing(lambda: (getattr(mine, "rank", None), getattr(mine, "fails", None))).installed(("llama-gqa",)):
        errors = run_local(5, work)
    assert all(error is not None and "ran out of memory with a slice of 12" in error for error in errors)
    assert errors[2] is not None and "rank 2, 3, 4, 0, 1 of the 5 in its chain ran out" in errors[2]
