"""How a chain cuts its prompts: as the job says, turned so that the right rank has the last slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_jobs import Ran, load
from made_logs import logger_to
from made_tables import a_table

from kvr_mpi.compress.planned_drop import PlannedDrop
from kvr_mpi.costs.solve import Rates
from kvr_mpi.errors import DocumentError, PartitionError
from kvr_mpi.fairkv.sharing import PlacedHeads
from kvr_mpi.job.spec import DecodeSection
from kvr_mpi.kv.relay import relays
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.logs import SILENT, RankLogger
from kvr_mpi.model import load_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.memory_budget import GIB, footprint_of
from kvr_mpi.runtime.chain_runner import SharedPrefix, absent_prefix
from kvr_mpi.runtime.plan import Way
from kvr_mpi.runtime.planner import Planner
from kvr_mpi.runtime.prompt import Prompt
from kvr_mpi.store.kv import Piece
from kvr_mpi.store.prefix import StoredPrefix
from kvr_mpi.tuning.table import Table

RATES = Rates(1e-6, 1e-9)
SHAPE = SimpleNamespace(check_ids=lambda ids: None, layers=())


def chain_of(size: int, **session: Any) -> Any:
    """A chain of so many ranks, with a byte for each token, and 1000 for activations."""
    usual: dict[str, Any] = {
        "spec": SimpleNamespace(
            is_plain=False,
            is_sharded=False,
            keeps_kv=True,
            questions=None,
            chunk_tokens="auto",
            generation=SimpleNamespace(max_new_tokens=4),
        ),
        "loaded": SimpleNamespace(attends_in_parts=True, shape=SHAPE),
        "footprint": SimpleNamespace(
            activation_bytes=lambda tokens: 1000, slice_bytes=lambda route, **given: 0, takes_chunks=False
        ),
        "kv_bytes": lambda tokens: tokens,
        "retain_of": lambda prompt: None,
        "pool": SimpleNamespace(is_paged=False),
        **{"free_bytes": [9999] * size, "rates": [], "prefixes": ()},
        **dict.fromkeys(("compression", "rolling", "table")),
        "logger": SILENT,
    }
    chain = SimpleNamespace(size=size)
    return SimpleNamespace(
        session=SimpleNamespace(**usual | session), chain=chain, first_rank=0, pack_tokens=2048, shared=None
    )


def cut_over(
    size: int, rates: Sequence[Rates], table: Table | None = None, logger: RankLogger = SILENT
) -> Callable[[int, int, int], Partition]:
    """How a chain of so many ranks cuts: takes new tokens, the rank that decodes, and known tokens."""
    planner = Planner(chain_of(size, rates=list(rates), table=table, logger=logger))
    return lambda tokens, decode_rank, known: planner.cut(known + tokens, known, decode_rank)


def test_a_slow_rank_has_a_short_slice_wherever_its_place_is() -> None:
    fast, slow = Rates(1e-6, 1e-12), Rates(4e-6, 4e-12)
    cut = cut_over(3, [fast, slow, fast])
    for decode_rank, place in ((2, 1), (1, 2), (0, 0)):  # ranks 0 1 2, then 2 0 1, then 1 2 0
        lengths = cut(8192, decode_rank, 0).lengths
        assert lengths.index(min(lengths)) == place and sum(lengths) == 8192
    # Tokens that are known make every token dearer.
    cut = cut_over(2, [RATES] * 2)
    first, _ = cut(8192, 1, 0).lengths
    after = cut(8192, 1, 100_000).bounds[1] - 100_000
    assert 4096 < after < first, "the more is known, the more even the slices"
    assert cut_over(4, [])(1024, 0, 0).lengths == (256,) * 4
    with pytest.raises(PartitionError, match="tokens"):
        cut(1, 0, 0)


def test_a_table_cuts_and_a_prompt_outside_of_it_is_warned_about_once() -> None:
    said: list[str] = []
    cut = cut_over(2, [], a_table(), logger_to(said))
    assert cut(2048, 1, 0) == a_table().entries[1].partition and not said
    for tokens in (5000, 6000, 100):
        assert cut(tokens, 1, 0).tokens == tokens
    assert len(said) == 1 and "from 1024 to 4096 tokens on 2 ranks; a prompt of 5000 tokens" in said[0]


def prompt_of(tokens: int, shared_tokens: int = 0) -> Prompt:
    ids = tuple(range(tokens))
    return Prompt(ids=ids, text=(0, 0), key="a", document_id="a", new_tokens=4, shared_tokens=shared_tokens)


@pytest.mark.parametrize(
    ("changed", "own"),
    [
        ({}, 5 + 4),
        (
            {"pool": SimpleNamespace(is_paged=True, nbytes=5000, page_bytes=0)},
            44 + 5 + 4,
        ),  # of 300 tokens one page is shared, the rest copied
        ({"loaded": SimpleNamespace(attends_in_parts=False, shape=SHAPE)}, 5 + 4),
    ],
)
def test_a_shared_document_is_counted_once(changed: dict[str, Any], own: int) -> None:
    """It is a prompt of its own, and those that share it keep only what follows it; a model's own attention copies."""
    copied = 305 if "loaded" in changed else 0
    planner = Planner(chain := chain_of(5, **changed))
    plan = planner.plan(prompt_of(305, 300), 1)
    assert plan.way is Way.ALONE and plan.prompt.is_prefix and plan.prompt.tokens == 300 and not plan.in_rows
    assert plan.kept == {1: 300} and plan.needs == [0, 300 + 1000, 0, 0, 0]
    chain.shared = SharedPrefix(absent_prefix(chain.session, prompt_of(305, 300)), 1)
    asked = planner.plan(prompt_of(305, 300), 0)
    assert asked.way is Way.ALONE and asked.known_tokens == 300 and asked.row_tokens == 5
    assert asked.kept == {1: own} and asked.needs == [0, own + copied + 1000, 0, 0, 0]
    other = planner.plan(replace(prompt_of(305, 300), ids=(7, *range(304))), 0)
    assert other.prompt.is_prefix and other.prompt.ids[0] == 7, "other tokens, however many"


def test_a_document_that_leaves_no_room_for_a_prompt_is_not_shared() -> None:
    for free, is_shared in ((300 + 9 + 1000, True), (300 + 8 + 1000, False)):
        chain = chain_of(1, free_bytes=[free])
        chain.session.footprint.slice_bytes = lambda route, **given: 0
        plan = Planner(chain).plan(prompt_of(305, 300), 0)
        assert plan.prompt.is_prefix == is_shared and plan.prompt.tokens == (300 if is_shared else 305)


@pytest.mark.parametrize(("page_bytes", "own"), [(None, 90 + 5 + 4), (3, 90 + 5 + 4 + 2 * 3)])
def test_a_question_about_a_compressed_document_is_planned_with_what_is_stored(
    page_bytes: int | None, own: int
) -> None:
    pool = SimpleNamespace(is_paged=page_bytes is not None, nbytes=5000, page_bytes=page_bytes)
    stored = StoredPrefix("a", (Piece("a", "kv.h5", 90, ""),), 300, "kvzip")
    chain = chain_of(2, pool=pool)
    prefix = SequenceKV(chain.session.loaded, pool, 300, length=300, compression="kvzip", source=stored)
    chain.prefix_of = lambda prompt, decode_rank: prefix
    plan = Planner(chain).plan(replace(prompt_of(305, 300), stored=stored), 1)
    assert plan.way is Way.ALONE and plan.kept == {1: own} and plan.needs == [0, own + 1000]
    chain.shared = SharedPrefix(prefix, 1)
    held = 90 + (page_bytes or 0)
    again = Planner(chain).plan(replace(prompt_of(305, 300), stored=stored), 1)
    assert again.kept == {1: own - held} and again.needs == [0, own - held + 1000]


def test_every_rank_keeps_its_shard_and_else_the_last_one_all() -> None:
    spec = SimpleNamespace(
        is_plain=False,
        is_sharded=True,
        keeps_kv=True,
        questions=None,
        chunk_tokens="auto",
        generation=SimpleNamespace(max_new_tokens=4),
    )
    assert Planner(chain_of(2)).plan(prompt_of(997), 0).kept == {0: 1001}
    sharded = Planner(chain_of(2, spec=spec))
    assert sharded.plan(prompt_of(997), 0).kept == {0: 501, 1: 501}
    with pytest.raises(DocumentError, match="1 tokens cannot be spread over 2 ranks"):
        sharded.plan(prompt_of(1), 0)


def test_memory_to_distribute_heads_is_planned() -> None:
    """Each rank's part of all prompts, and another prompt on the way; of three heads, one of two ranks gets two."""
    sharing = PlacedHeads(DecodeSection(mode="head-parallel", placement="static"), layers=2, kv_heads=3)
    chain = chain_of(2, free_bytes=[1000, 1000], sharing=sharing)
    planner = Planner(chain, shares_heads=True)
    assert planner.fits_shared([600, 600], 200) and not planner.fits_shared([600, 600], 201)
    assert planner.fits_shared([900, 0], 100) and not planner.fits_shared([900, 0], 101)
    assert Planner(chain).fits_shared([600, 600], 201)


def test_a_short_prompt_that_does_not_fit_whole_runs_in_chunks() -> None:
    footprint = SimpleNamespace(
        activation_bytes=lambda tokens: 1000,
        slice_bytes=lambda relay, **given: 20 * max(stop - start for start, stop in relay.chunks),
        takes_chunks=True,
        keeps_kv=True,
        shape=SimpleNamespace(kv_bytes_per_token=1),
    )
    planner = Planner(chain_of(1, footprint=footprint))
    whole, chunked = planner.plan(prompt_of(400), 0), planner.plan(prompt_of(800), 0)
    assert (whole.way, chunked.way, chunked.chunk_tokens) == (Way.ALONE, Way.CHAIN, 256)
    with pytest.raises(DocumentError, match="a prompt of 400 tokens does not fit"):
        Planner(chain_of(1, footprint=footprint, free_bytes=[20])).plan(prompt_of(400), 0)


def test_a_document_that_fits_only_in_chunks_is_answered_as_ever(
    job: Path, tmp_path: Path, run_job: Callable[..., Ran]
) -> None:
    truth, model = run_job(1).records, load_model(str(load(job).model.path), dtype="float32", cache_dir=tmp_path)
    footprint, longest = footprint_of(model.model.config, model.dtype), max(one.prompt_tokens for one in truth.values())
    (whole,), (chunked,) = (relays(Partition((0, longest)), 0, chunk) for chunk in (None, 128))
    least, most = (footprint.slice_bytes(one, reserve_tokens=8) for one in (chunked, whole))
    tight = run_job(1, f"parallel.memory_gib={(least + most) / 2 / GIB:.9f}")
    assert tight.tokens == {name: record.token_ids for name, record in truth.items()}


@pytest.mark.parametrize(("dropped", "free"), [(300, 104), (300, 103), (0, 104)])
def test_what_compression_drops_makes_room_and_is_not_kept(dropped: int, free: int) -> None:
    """Also for whole slices, where chunks would need less."""
    fits = dropped == 300 and free == 104

    def slice_bytes(relay: Any, drop: PlannedDrop | None = None, **given: Any) -> int:
        return (404 if len(relay.chunks) == 1 or not fits else 104) - (drop.kv_bytes if drop else 0)

    footprint = SimpleNamespace(
        activation_bytes=lambda tokens: 0,
        slice_bytes=slice_bytes,
        takes_chunks=True,
        keeps_kv=True,
        shape=SimpleNamespace(kv_bytes_per_token=1),
    )
    drop = PlannedDrop(dropped, 0) if dropped else None
    compression = SimpleNamespace(planned_drop=lambda tokens, text: drop)
    for size in (1, 2):
        chain = chain_of(size, footprint=footprint, compression=compression, free_bytes=[free] * size)
        if not fits:
            with pytest.raises(DocumentError, match="a prompt of 400 tokens does not fit"):
                Planner(chain).plan(prompt_of(400), 0)
            continue
        plan = Planner(chain).plan(prompt_of(400), 0)
        assert plan.kept == {0: 104} and plan.needs is not None and max(plan.needs) == 104
        assert plan.way is (Way.ALONE if size == 1 else Way.CHAIN) and plan.chunk_tokens is None


def test_a_prompt_with_ids_that_the_model_lacks_is_refused() -> None:
    def refuse(ids: Sequence[int]) -> None:
        raise DocumentError(f"no id {max(ids)}")

    loaded = SimpleNamespace(shape=SimpleNamespace(check_ids=refuse))
    with pytest.raises(DocumentError, match="no id 2"):
        Planner(chain_of(1, loaded=loaded)).plan(prompt_of(3), 0)
