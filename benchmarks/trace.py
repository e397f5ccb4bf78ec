"""What a trace costs: prompts prefilled over all ranks, recorded and not, in turn.

mpirun -n 2 python -m benchmarks trace [--model MODEL] [--tokens 1024] [--pairs 30] [--json FILE]

Of each pair one prompt is recorded and written as a job does, by the writer's thread every two seconds, and one is not,
in an order that alternates. What counts is the ratio of each pair, its median, and the interval that holds the median
in 95 of 100 samples drawn from the pairs: of the time that passes, and of rank 0's processor time, which other programs
on the machine disturb less.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import make_parser
from benchmarks.pairs import Patience, measure_pairs, ratio_of
from kvr_mpi.cli.environment import read_environment
from kvr_mpi.cli.options import DEFAULT_MODEL
from kvr_mpi.errors import counted
from kvr_mpi.events import Events
from kvr_mpi.logs import RankLogger
from kvr_mpi.model import load_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.self_check import check_chain
from kvr_mpi.store.traces import TraceHeader, TraceWriter, read_traces
from kvr_mpi.transport.forwarder import Forwarder
from kvr_mpi.transport.mpi import connect

# What a trace may cost.
ALLOWED = 1.01


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = make_parser("trace", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args(arguments)
    world = connect()
    torch.set_num_threads(1)
    cache = read_environment().cache_dir
    loaded = check_chain(load_model(wanted.model, dtype="float32", device="cpu", offline=True, cache_dir=cache))
    ids = [(7 * at * at + 3 * at) % 4096 + 5 for at in range(wanted.tokens)]
    partition = Partition.even(wanted.tokens, world.size)
    with tempfile.TemporaryDirectory() as folder:
        events, offset_s = Events(keeps_spans=True), time.time() - time.perf_counter()
        header = TraceHeader(world.rank, world.size, 1, "here", "cpu")
        writer = TraceWriter(Path(folder), header, events, offset_s=offset_s, limit_bytes=1 << 26, logger=RankLogger())
        forwarders = Forwarder(world), Forwarder(world, events=events)

        def prefill(is_traced: bool) -> tuple[float, float]:
            world.barrier()
            events.keeps_spans, began, cpu = is_traced, time.perf_counter(), time.process_time()
            done = prefill_kvr(loaded, ids, partition, world, forwarder=forwarders[is_traced])
            if is_traced:
                for span in done.spans:
                    events.add(span)
            used_s = time.process_time() - cpu
            world.barrier()
            return time.perf_counter() - began, used_s

        for is_traced in (False, True):
            prefill(is_traced)
        found = measure_pairs(
            world, "plain", ["traced"], lambda way: prefill(way == "traced"), lambda run: run[0], Patience(wanted.pairs)
        )
        pairs = [(plain, traced) for traced, plain in found["traced"]]
        for forwarder in forwarders:
            forwarder.close()
        events.keeps_spans = True
        writer.close()
        spans = sum(len(trace.spans) for trace in read_traces(Path(folder)))
    if world.rank:
        return
    told: dict[str, Any] = {"ranks": world.size, "tokens": wanted.tokens, "spans": spans, "pairs_s": pairs}
    print(f"{wanted.tokens} tokens over {counted(world.size, 'rank')}, {wanted.pairs} pairs, {spans} spans on rank 0")
    for place, name in enumerate(("time", "processor time")):
        ratio = ratio_of([traced[place] / plain[place] for plain, traced in pairs])
        plain_s = statistics.median(plain[place] for plain, _ in pairs)
        told[name] = {"ratio": ratio.median, "low": ratio.low, "high": ratio.high, "plain_s": plain_s}
        verdict = "under 1%" if ratio.high < ALLOWED else "over 1%" if ratio.low > ALLOWED else "not told from 1%"
        print(
            f"{name:14} {plain_s:.3f} s; recorded {100 * (ratio.median - 1):+.2f}% ({100 * (ratio.low - 1):+.2f} to "
            f"{100 * (ratio.high - 1):+.2f}%): {verdict}"
        )
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(told, indent=1) + "\n")
