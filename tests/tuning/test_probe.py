from __future__ import annotations

import pytest
import torch
from models import STATES, tiny

from kvr_mpi.costs.solve import equal_time
from kvr_mpi.model import LayerShape, StateShape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.tuning import measure
from kvr_mpi.tuning.measure import MOST_RUNS, fastest, measure_rates


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "falcon-mqa", *STATES])
def test_rates_are_positive_and_make_a_partition(name: str) -> None:
    loaded = tiny(name)
    prepare_model(loaded.model, chain=True)
    (rates,) = measure_rates(loaded, LocalTransport())
    assert rates.token_s > 0 and rates.pair_s >= 0
    lengths = equal_time(400, [rates] * 4)
    assert Partition.by_ratio(400, lengths).size == 4
    assert lengths == sorted(lengths, reverse=True)


def test_ranks_agree_on_the_rates() -> None:
    loaded = tiny("llama-gqa")
    prepare_model(loaded.model, chain=True)
    first, second = run_local(2, lambda rank: measure_rates(loaded, rank))
    assert first == second and len(first) == 2


@pytest.mark.parametrize(
    "ranks, least, runs",
    [
        ([[2.0, 1.0, 1.01, 1.02, 0.5]], [1.0], 4),
        ([[1.0, 1.0, 1.0, 1.5, 0.5], [3.0, 2.0, 2.0, 2.0, 1.0]], [1.0, 2.0], 4),
        ([[float(2 * MOST_RUNS - run) for run in range(2 * MOST_RUNS)]], [MOST_RUNS + 1.0], MOST_RUNS),
    ],
)
def test_ranks_measure_until_all_have_three_runs_that_agree(
    ranks: list[list[float]], least: list[float], runs: int
) -> None:
    done = [iter(times) for times in ranks]
    found = run_local(len(ranks), lambda rank: fastest(rank, lambda: [next(done[rank.rank])]))
    assert found == least
    assert [len(times) - len(list(left)) for times, left in zip(ranks, done, strict=True)] == [runs] * len(ranks)


def test_a_run_that_times_several_layers_is_not_believed_alone() -> None:
    runs = iter([[3.0, 3.0, 3.01], [2.0, 2.01, 2.5], [2.02, 2.5, 2.5], [1.0]])
    assert fastest(LocalTransport(), lambda: next(runs)) == 2.0
    assert [*runs] == [[1.0]]


def test_the_pretended_chain_has_sent_everything() -> None:
    chain = measure.PretendedChain()
    buffer = torch.ones(4)
    chain.irecv(buffer, 0, 0).wait()
    assert chain.rank == 1 and buffer.sum() == 0


def test_whole_periods_of_layers_are_timed() -> None:
    """Where every fourth layer attends, and the others keep a state, three layers would say nothing of attention."""
    attention, recurrent = LayerShape(2, 8, 8), LayerShape(states=(StateShape("recurrent", 0, (1, 2, 8, 8)),))
    assert measure._layers_timed([attention] * 30) == (3, 1)
    assert measure._layers_timed([attention] * 3) == (2, 1)
    assert measure._layers_timed(([recurrent] * 3 + [attention]) * 9) == (4, 4)
    assert measure._layers_timed(([recurrent] * 5 + [attention]) * 4) == (6, 6)
    assert measure._layers_timed([recurrent, attention, recurrent]) == (2, 2)
    assert measure._layers_timed([attention]) == (0, 0)
    shared = LayerShape()  # its keys are those of an earlier layer
    assert measure._layers_timed([recurrent, attention] * 5 + [shared] * 4) == (4, 2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("most", [None, 1 << 20, 4096, 512, 3, 2, 1])
def test_the_probe_stays_within_the_context(device: str, most: int | None) -> None:
    tokens, prefix = measure._probe_lengths(device, most)
    assert tokens > 0 and prefix > 0 and tokens + prefix <= max(2, most or 1 << 20)
    if most is None:
        assert (tokens, prefix) == ((768, 3072) if device == "cpu" else (8192, 16384))
