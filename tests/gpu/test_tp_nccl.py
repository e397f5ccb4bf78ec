"""Sums within groups beside a chain of groups, over one stand-in for NCCL. No GPU has run any of this.

Of two sorts of messages on one GPU either may wait for a rank that waits for the other. Every run ends with the right
answers, with pauses drawn anew: a message in another order would be taken for another. And all of them together leave
the GPU more than half its room, so that none waits for another's to end.
"""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import ids_of, make_folder, truth_of
from failing_sums import sums_end
from fake_nccl import MULTIPROCESSORS, Network, installed, run_on_gpus
from pretended_cuda import PretendedCuda
from test_nccl import greedy_there

from kvr_mpi.errors import TransportError
from kvr_mpi.model import load_model
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.tp_group import TensorParallelGroup
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import is_out_of_memory
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.runtime.job_ranks import _Watch, join_groups
from kvr_mpi.topology import Topology
from kvr_mpi.transport.choose import warm_up
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.transport.nccl import NcclTransport

IDS, NEW_TOKENS = ids_of(24), 2


def run_groups(folder: Path, gpus: PretendedCuda, network: Network) -> list[list[list[int]]]:
    """Two groups of two ranks: prompts that end at each in turn, without a barrier, and their answers."""

    def work(ranks: NcclTransport) -> list[list[int]]:
        device = torch.device("cuda", ranks.rank)
        warm_up(ranks, device)
        job = join_groups(ranks, ranks._control, Topology(4, 4, 2), device)
        assert job.tp_group is not None
        loaded = load_model(str(folder), tp_group=job.tp_group, device="cpu", cache_dir=folder)
        prepare_model(loaded.model, chain=True)
        mine = gpus.move(loaded, device)
        warm_up(job.lane, device)
        forwarder = Forwarder(job.lane, device=device)
        found: list[list[int]] = []
        for last in (1, 0, 1):
            options: Any = {"reserve_tokens": NEW_TOKENS, "last": last, "forwarder": forwarder}
            prefill = prefill_kvr(mine, IDS, Partition((0, 14, 24)), job.lane, **options)
            found += [greedy_there(mine, prefill)] if prefill.logits is not None else []
        forwarder.close()
        return found

    return run_on_gpus(4, network, work)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    made, model = make_folder(tmp_path_factory.mktemp("groups"), "llama")
    return made, truth_of(model, IDS, NEW_TOKENS)[1]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(1, 2), pytest.param(range(3, 9), marks=pytest.mark.long)])
def test_sums_and_a_chain_never_wait_for_each_other(
    seeds: Any, folder: tuple[Path, list[int]], gpus: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, truth = folder
    words, tell = list[int](), _Watch.tell
    monkeypatch.setattr(_Watch, "tell", lambda watch, word: (words.append(word), tell(watch, word))[1])
    for number, seed in enumerate(seeds):
        draw = random.Random(seed)
        network = installed(monkeypatch, Network(gpus, pauses=lambda draw=draw: draw.choice((0.0, 0.0, 4e-3))))
        gpus.watches = not number
        found = run_groups(path, gpus, network)
        assert [len(each) for each in found] == [1, 1, 2, 2]
        assert [tokens for each in found for tokens in each] == [truth] * 6
        assert gpus.faults == [] and gpus.syncs_of_devices == []
        assert max(network.most_held.values()) <= MULTIPROCESSORS // 2
    assert words == [0] * len(words) and len(words) == 4 * 3 * len(seeds), "each rank once in each prompt"


def test_a_rank_that_fails_between_sums_ends_those_of_the_others(gpus: PretendedCuda, network: Network) -> None:
    """Its host waits for a GPU that waits for the rank that failed; the next sums are right."""

    def work(ranks: NcclTransport) -> object:
        return sums_end(ranks, ranks._control, torch.device("cuda", ranks.rank))

    assert all(run_on_gpus(2, network, work)) and gpus.faults == []
    broken = ("sum 1", "sum 2", "sum 3", "sum 4")
    assert [group.ended for group in network.groups if group.name.startswith(broken)] == ["aborted"] * 8
    gc.collect()
    assert not network.stuck and not any(group.recorded for group in network.groups)


def test_a_status_word_may_come_after_the_forward_pass_that_has_posted_its_receive() -> None:
    """It comes into a tensor that may be changed within inference and outside of it."""

    def rank(world: LocalTransport) -> list[int]:
        watch: Any = _Watch(world, Any)
        with torch.inference_mode():
            assert not watch.hears()
        world.barrier()
        time.sleep(0.1 * world.rank)
        return list(watch.tell(0))

    assert run_local(2, rank) == [[0, 0]] * 2


def test_status_words_that_cannot_be_exchanged_are_not_sent_again() -> None:
    """The others would never answer."""
    told: list[int] = []

    def tell(word: int) -> list[int]:
        told.append(word)
        raise TransportError("the link is down")

    group = TensorParallelGroup(0, 2, print, tell, is_out_of_memory)
    with pytest.raises(TransportError, match="down"), group.guarded(), group.guarded():
        pass
    assert told == [0]
