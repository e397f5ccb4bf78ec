"""How fast keys and values are written, and what a document costs.

    python -m benchmarks store [FOLDER] [--gib 1] [--documents 60]

Keys and values of several documents go through a `ResultWriter`, against np.tofile and fsync of the same bytes, in
turn; then a loop that computes for a second a document is timed with and without writing.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.options import make_parser
from kvr_mpi.store.log import Header
from kvr_mpi.store.record import Record
from kvr_mpi.store.writer import ResultWriter

HEADER = Header({"model": "bench"}, {"name": "bench", "architecture": "none", "dtype": "float16"})
LAYERS, HEADS, DIM = 32, 8, 128


def layers_of(size_bytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make keys and values of all layers, of so many bytes in all."""
    tokens = size_bytes // (LAYERS * 2 * HEADS * DIM * 2)
    one = torch.randn(tokens, HEADS, DIM).half()
    return [(one + layer, one - layer) for layer in range(LAYERS)]


def write_plain(folder: Path, documents: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> float:
    """Time np.tofile and fsync."""
    began = time.perf_counter()
    for number, layers in enumerate(documents):
        with (folder / f"plain-{number}").open("wb") as stream:
            for layer in layers:
                for tensor in layer:
                    tensor.numpy().tofile(stream)
            stream.flush()
            os.fsync(stream.fileno())
    return time.perf_counter() - began


def write_results(folder: Path, documents: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> float:
    """Time a `ResultWriter`."""
    began = time.perf_counter()
    writer = ResultWriter(folder, 0, HEADER)
    for number, layers in enumerate(documents):
        writer.write(Record(f"document-{number}", "done"), layers)
    writer.close()
    return time.perf_counter() - began


def compute(product: torch.Tensor, rounds: int) -> None:
    """Keep a core busy."""
    for _ in range(rounds):
        product @ product


def pace(folder: Path, documents: int, rounds: int, product: torch.Tensor, writes: bool) -> float:
    """Seconds for documents that take a second each to compute, answers of 96 tokens."""
    writer = ResultWriter(folder, 0, HEADER)
    began = time.perf_counter()
    for number in range(documents):
        compute(product, rounds)
        if writes:
            record = Record(f"document-{number}", "done", answer="word " * 96, token_ids=tuple(range(96)))
            writer.write(record)
    took = time.perf_counter() - began
    writer.close()
    return took


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = make_parser("store", __doc__)
    parser.add_argument("folder", nargs="?", default=".")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--documents", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    if not Path(options.folder).is_dir():
        parser.error(f"{options.folder} is no folder")
    documents = [layers_of(int(options.gib * 2**30) // 4) for _ in range(4)]
    size = sum(tensor.nbytes for layers in documents for layer in layers for tensor in layer)
    ratios = []
    for _ in range(options.repeats):
        folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="bench-store-"))
        try:
            plain, ours = write_plain(folder, documents), write_results(folder, documents)
        finally:
            shutil.rmtree(folder)
        ratios.append(plain / ours)
        print(f"tofile + fsync {size / plain / 2**30:.2f} GiB/s, volumes {size / ours / 2**30:.2f} GiB/s", flush=True)
    print(f"volumes reach {100 * statistics.median(ratios):.0f}% of it (median of {options.repeats}; goal 60%)")
    if options.documents:
        torch.set_num_threads(1)
        product = torch.randn(512, 512)
        began = time.perf_counter()
        compute(product, 200)
        rounds = round(200 / (time.perf_counter() - began))
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(6):
            folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="bench-store-"))
            times[turn % 2 == 1].append(
                pace(folder, options.documents, rounds, product, turn % 2 == 1) / options.documents
            )
            shutil.rmtree(folder)
        bare, full = (min(times[kind]) for kind in (False, True))
        print(f"a document takes {bare:.3f} s, and {full:.3f} s if stored: {100 * (full / bare - 1):+.1f}% (goal 2%)")
