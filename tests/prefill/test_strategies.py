"""Jobs run by chains, rings, or whichever is forecast to be faster; and the registry all of it comes from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import NEW_TOKENS, single
from made_jobs import TEXT, answers, with_settings
from made_tables import COSTS, a_table, an_entry, fitting
from models import prompt, tiny
from pipelines import Failing

from benchmarks.published import LENT, PUBLISHED
from kvr_mpi.errors import DocumentError, ModelError
from kvr_mpi.kv.route import Route
from kvr_mpi.model import LayerShape, StateShape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import allowed_error, differences, first_difference, follow
from kvr_mpi.prefill.memory_budget import check_fits, footprint_of
from kvr_mpi.prefill.one_prompt import compute_prefix
from kvr_mpi.prefill.registry import JOB_STRATEGIES, KVR, MARGIN, STRATEGIES, candidates, fastest
from kvr_mpi.prefill.routes import ring
from kvr_mpi.store.results import open_results
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.tuning.table import save_table

RING = STRATEGIES["ring"]
SHARING = [name for name, strategy in LENT.items() if not strategy.is_plain]
KVR_CUT = Partition((0, 20, 40, 50, 64))


@pytest.fixture
def job(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A job over documents of other numbers of sentences, for a tiny model."""
    sentences = enumerate([10, 12, 14, 0, 9, 15, 1, 11])
    rows = (f'{{"id": "d{n:03d}", "text": "Document {n}. {TEXT * count}"}}\n' for n, count in sentences)
    (tmp_path / "corpus.jsonl").write_text("".join(rows))
    (path := tmp_path / "job.toml").write_text(f"""
        model = {{path = "{tiny_model_dir}", dtype = "float32"}}
        documents.path = "{tmp_path / "corpus.jsonl"}"
        prompt.template = "Summarise: {{text}} Summary:"
        generation.max_new_tokens = 6
        parallel.partition = "even"
        output.path = "{tmp_path / "job"}"
    """)
    return path


@pytest.mark.slow
def test_auto_takes_what_a_table_forecasts_to_be_faster(
    job: Path, tmp_path: Path, tiny_model_dir: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of 19 to 1 leave the second rank with nothing to do; on a slow link a ring waits in every layer."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the table says
    uneven = [an_entry((0, tokens * 19 // 20, tokens)) for tokens in (128, 512)]
    best, slow, found = a_table(contexts=(128, 256, 512)), replace(COSTS, link_bytes_per_s=1e8), []
    for chosen, changes in (("ring", {"entries": tuple(uneven)}), ("kvr", {"rates": slow})):
        save_table(fitting(best.model_copy(update=changes), tiny_model_dir), tmp_path / "table.json")
        settings = with_settings(f"parallel.partition={tmp_path / 'table.json'}", "parallel.strategy=auto")
        run = run_here(2, [job, "--overwrite", *settings])
        assert run.returncode == 0, run.stderr
        assert {record.strategy for record in open_results(tmp_path / "job") if len(record.slices) > 2} == {chosen}
        found.append(answers(tmp_path / "job"))
    assert found[0] == found[1]


def test_a_tie_is_the_chains() -> None:
    assert fastest([1.0, 1.0 - MARGIN / 2]) == 0 and fastest([1.0, 1.0 - 2 * MARGIN]) == 1
    assert [one.name for one in candidates("auto")] == ["kvr", "ring"]
    assert [one.name for one in candidates("single")] == ["single"]
    assert JOB_STRATEGIES == ("auto", "single", "ring", "kvr")


# A length that the ranks divide, and two that they do not.
@pytest.mark.parametrize(
    ("size", "tokens", "known"), [(2, 61, 0), (3, 60, 9), pytest.param(4, 67, 9, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("is_published", [False, True])
@pytest.mark.parametrize("name", SHARING)
def test_strategies_equal_one_process_behind_a_prefix(
    name: str, is_published: bool, size: int, tokens: int, known: int
) -> None:
    """As jobs run them, and as published: a baseline that computes something else would prove nothing."""
    strategy = (PUBLISHED if is_published else LENT)[name]
    cut = strategy.cut_evenly(tokens, size, known)
    owned = [stretch for one in strategy.routes(cut, known) for stretch in one.owned]
    assert sum(stop - start for start, stop in owned) == tokens - known
    for model in ("llama-gqa", "mistral-window", "falcon-mqa", "gpt2", "gemma2-softcap", "gpt-oss-sinks"):
        loaded, ids = tiny(model), prompt(tokens)
        truth = follow(loaded.model, single(loaded, ids), NEW_TOKENS)
        prepare_model(loaded.model, chain=True)
        prefix = compute_prefix(loaded, ids[:known]) if known else None
        options: dict[str, Any] = {"prefix": prefix, "last": 1, "reserve_tokens": NEW_TOKENS}
        ranks = run_local(size, lambda rank: strategy.prefill(loaded, ids, cut, rank, **options))  # noqa: B023
        assert [at for at, rank in enumerate(ranks) if rank.logits is not None] == [1]
        found = follow(loaded.model, ranks[1], NEW_TOKENS)
        assert first_difference(differences(found, truth), allowed_error(torch.float32)) is None, model
        assert found.tokens == truth.tokens and ranks[1].strategy == name, model


def test_what_crosses_the_links() -> None:
    """KVR sends a segment once over every link after it; a ring and an all-gather send all to all but one."""
    loaded, tokens, size = tiny("llama-gqa"), 64, 4
    ids, row = prompt(tokens), loaded.shape.kv_bytes_per_token
    prepare_model(loaded.model, chain=True)
    for name in SHARING:
        cut = KVR_CUT if name == "kvr" else LENT[name].cut_evenly(tokens, size)
        ranks = run_local(size, lambda rank: LENT[name].prefill(loaded, ids, cut, rank))  # noqa: B023
        sent = [rank.sent_bytes // row for rank in ranks]
        assert sent == [20, 40, 50, 0] if name == "kvr" else sum(sent) == (size - 1) * tokens, name


def test_models_that_cannot_go_round_are_refused_by_name() -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    RING.check(loaded)
    whole = replace(loaded, attends_in_parts=False)
    with pytest.raises(ModelError, match=r"'ring': LlamaForCausalLM: .* cannot be computed in parts.*'kvr'"):
        RING.check(whole)
    KVR.check(whole)
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
    cut, failing = RING.cut_evenly(60, 5), Failing()

    def work(rank: LocalTransport) -> str | None:
        failing.layer = -1
        return RING.prefill(loaded, ids, cut, Rendezvous(rank._hub, rank.rank), last=2, spares_chain=True).error

    with failing.installed(("llama-gqa",)):
        errors = run_local(5, work)
    assert all(error is not None and "ran out of memory with a slice of 12" in error for error in errors)
    assert errors[2] is not None and "rank 2, 3, 4, 0, 1 of the 5 in its chain ran out" in errors[2]
