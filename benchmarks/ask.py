"""What stored keys and values save and cost: asking again against prefilling again, writing, reading, holding.

mpirun -n 2 python -m benchmarks ask [--tokens 4096] [--question 30] [--repeats 5] [--only WHAT,...] [FOLDER]

In pairs, back to back; ratios are of pairs: least, median, most.

write : prefills of which every rank writes its own slice meanwhile, until all is durable, against the same without.
ask : document and question prefilled over all ranks, against the question alone by one rank that loads the document;
    files in memory, and read from the disk.
read : reading with checksums, against np.fromfile of as many bytes.
sharded : some questions by all ranks together, of which each holds its share, in one row after a document that is read
    once, against one at a time, each of which reads it; and what a rank holds of the document then, in tensors and as
    the system counts it, over 1 / ranks of all keys and values.
compressed : processor time of one rank to read a document, then to the first tokens of one question or of some in a
    row, and to the end of their answers: of a document stored whole, against the same one compressed by KVzip.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.compress import compression_of
from benchmarks.memory import held_bytes, peak_bytes, reset_peak
from benchmarks.options import make_parser
from benchmarks.pretrained import opened_model
from kvr_mpi.cli.options import DEFAULT_MODEL
from kvr_mpi.compress.compression import Compression
from kvr_mpi.decode.group import held_bytes as tensor_bytes
from kvr_mpi.documents import read_corpus
from kvr_mpi.kv.chain import layer_kv
from kvr_mpi.kv.row import Row
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import Prefill, own_pool, prefill_kvr
from kvr_mpi.prefill.packed import Gathering, decode_packed, prefill_packed, share_out_stored
from kvr_mpi.prefill.self_check import check_chain
from kvr_mpi.runtime.loading import load_on_all
from kvr_mpi.store.kv import CachedTokens, Piece
from kvr_mpi.store.kv_reader import KVReader
from kvr_mpi.store.log import Header
from kvr_mpi.store.prefix import StoredPrefix, open_prompt
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results
from kvr_mpi.store.writer import ResultWriter
from kvr_mpi.transport import Transport, gather_json, on_root, share_json
from kvr_mpi.transport.choose import open_transport
from kvr_mpi.transport.mpi import connect

HEADER = Header({"model": "bench"}, {"name": "bench", "architecture": "none", "dtype": "float32"})
WRITTEN = 3  # prefills of which keys and values are written
TOGETHER = 8  # questions that are asked about a document
ASKED = (1, 4)  # questions about a compressed document, in a row
NEW_TOKENS = 32
WHAT = ("write", "ask", "read", "sharded", "compressed")


def drop_pages(path: Path) -> None:
    """Give back what the system holds of a file in memory, as far as it can be: the next reader reads the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def document_ids(loaded: LoadedModel, tokens: int) -> list[int]:
    """Take so many tokens of real text."""
    text = "\n\n".join(document.text for document in read_corpus(["jobs/demo"]))
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return (ids * (tokens // len(ids) + 1))[:tokens]


class Bench:
    """Stored and computed prompts on the same ranks."""

    def __init__(self, options: argparse.Namespace, world: Transport, folder: Path) -> None:
        self.world, self.folder, self.options = world, folder, options
        self.loaded = check_chain(load_on_all(world, options.model, cache_dir=Path.home() / ".cache/kvr-mpi"))
        self.ids = document_ids(self.loaded, options.tokens)
        self.question = document_ids(self.loaded, options.question)
        self.size = len(self.ids) * self.loaded.shape.kv_bytes_per_token
        self._prefill: Prefill | None = None
        self._files = 0

    def say(self, what: str, found: dict[str, Any]) -> None:
        """Print a line of JSON on rank 0."""
        if self.world.rank == 0:
            head = {"what": what, "tokens": self.options.tokens, "ranks": self.world.size}
            print(json.dumps(head | found), flush=True)

    def slowest(self, seconds: float) -> float:
        """Seconds of the rank that took longest."""
        return float(max(self.everyone(seconds)))

    def everyone(self, value: float) -> list[float]:
        """Gather a value of every rank."""
        return list(share_json(self.world, gather_json(self.world, value)))

    def cut(self, tokens: int) -> Partition:
        """Cut a prompt into one slice per rank."""
        # A prompt's first slice is the longer one, as equal time wants it.
        return Partition.by_ratio(tokens, [1.5**-rank for rank in range(self.world.size)])

    def prefill(self, ids: list[int], **options: Any) -> Prefill:
        return prefill_kvr(self.loaded, ids, self.cut(len(ids)), self.world, **options)

    def write(self, writes: bool) -> float:
        """Seconds of some prefills, of which every rank writes its slice while it computes, if that is wanted."""
        rank, tokens = self.world.rank, len(self.ids)
        start, stop = self.cut(tokens).slices()[rank]
        folder = self.folder / f"rank-{rank}"
        folder.mkdir(exist_ok=True)
        writer = ResultWriter(folder, rank, HEADER) if writes else None
        self.world.barrier()
        began = time.perf_counter()
        for number in range(WRITTEN):
            record = Record(f"document-{number}", "done", slices=self.cut(tokens).bounds)
            if writer is None:
                self.prefill(self.ids)
            elif stop == tokens:
                cache = self.prefill(self.ids).cache
                layers = [layer_kv(cache, layer, start) for layer in range(len(cache.layers))]
                writer.write(record, layers, CachedTokens(self.ids, (0, tokens), start))
            else:
                whose = CachedTokens(self.ids[:stop], (0, stop), start)
                with writer.writing_piece(record, whose) as own:
                    self.prefill(self.ids, write_layer=own.add_layer)
        if writer is not None:
            writer.close()
        self.world.barrier()
        seconds = time.perf_counter() - began
        shutil.rmtree(folder)
        return seconds

    def fresh(self) -> float:
        """Seconds to the first token of document and question, over all ranks."""
        self.world.barrier()
        return self.slowest(self.prefill([*self.ids, *self.question], keeps_all=True).seconds)

    def store(self, compression: Compression | None = None) -> Path:
        """Write the document's keys and values, all by the last rank; return the file. Compressed ones come last."""
        is_last, text = self.world.rank == self.world.size - 1, (0, len(self.ids))
        if self._prefill is None:
            self._prefill = self.prefill(self.ids, keeps_all=True)
        self._files += 1
        folder = self.folder / f"file-{self._files}"
        if is_last:
            cache, tokens = self._prefill.cache, CachedTokens(self.ids, text)
            if compression is not None:
                compression.repeat(cache, self.ids, text)
                kept = {idx: tuple(own.numpy() for own in cache.kept_positions(idx)) for idx in sorted(cache.ragged)}
                tokens = CachedTokens(self.ids, text, 0, str(compression.settings), kept)
            folder.mkdir()
            writer = ResultWriter(folder, 0, HEADER)
            writer.write(Record("document", "done"), [layer_kv(cache, at) for at in range(len(cache.layers))], tokens)
            writer.close()
        self.world.barrier()
        return next(folder.glob("*.h5"))

    def open(self, file: Path, bounds: tuple[int, int] | None = None, longest: int | None = None) -> SequenceKV:
        """Open some tokens of the document; rows are held against their checksums."""
        pieces = tuple(pieces_in(file))
        stored = StoredPrefix("document", pieces, len(self.ids), open_prompt("document", pieces)[1].compression)
        return stored.open(self.ids, self.loaded, own_pool(self.loaded), bounds=bounds, longest=longest)

    def ask(self, file: Path, *, cold: bool = False) -> float:
        """Seconds to the first token of the question, by rank 0, which loads the document."""
        self.world.barrier()
        seconds = 0.0
        if self.world.rank == 0:
            if cold:
                drop_pages(file)
            began = time.perf_counter()
            document, prompt = self.open(file), [*self.ids, *self.question]
            prefill_packed(self.loaded, [prompt], prefix=document, reserve_tokens=NEW_TOKENS)
            seconds = time.perf_counter() - began
        return self.slowest(seconds)

    def answer(self, file: Path, questions: int) -> tuple[float, float, float]:
        """Processor seconds of reading the document, of some questions in a row, and of their answers."""
        marks, document = [time.process_time()], self.open(file)
        for layer in range(len(document.layers)):
            document.open(layer)
        marks.append(time.process_time())
        prompts = [[*self.ids, *self.question]] * questions
        prefills = prefill_packed(self.loaded, prompts, prefix=document, reserve_tokens=NEW_TOKENS)
        assert all(prefill.error is None for prefill in prefills), prefills[0].error
        marks.append(time.process_time())
        row = Row([prefill.cache for prefill in prefills])
        for _ in range(NEW_TOKENS):
            decode_packed(self.loaded, row, self.question[:1] * questions)
        marks.append(time.process_time())
        for prefill in prefills:
            prefill.release()
        document.release()
        read_s, question_s, answer_s = (after - before for before, after in itertools.pairwise(marks))
        return read_s, question_s, answer_s

    def compare_compressed(self, whole: Path) -> None:
        """Say what questions about a compressed document take, and those about the whole document."""
        compression = compression_of(self.loaded, "kvzip", self.options.budget, "document", Path(), 0)
        files = whole, self.store(compression)
        if self.world.rank:
            return
        self.say("bytes stored, whole and compressed", {"bytes": [file.stat().st_size for file in files]})
        for questions in ASKED:
            pairs = [[self.answer(file, questions) for file in files] for _ in range(self.options.repeats + 1)][1:]
            for count, name in enumerate(("reading", "and first tokens", f"and {NEW_TOKENS} tokens each"), 1):
                sums = [(sum(one[:count], 0.0), sum(other[:count], 0.0)) for one, other in pairs]
                self.say(f"{questions} questions, {name}: whole document, against compressed", ratio(sums))

    def ask_together(self, file: Path, questions: int) -> tuple[float, SequenceKV, list[Prefill]]:
        """Seconds to the first tokens of some questions in a row, by all ranks, of which each loads its share."""
        size, rank, tokens = self.world.size, self.world.rank, len(self.ids)
        bounds = share_out_stored(tokens, tokens, size).slices()[rank]
        self.world.barrier()
        began = time.perf_counter()
        document = self.open(file, bounds, tokens + len(self.question) + NEW_TOKENS)
        prompts, gathering = [[*self.ids, *self.question]] * questions, Gathering(self.loaded, self.world)
        last = self.world.size - 1
        prefills = prefill_packed(
            self.loaded, prompts, prefix=document, reserve_tokens=NEW_TOKENS, gathering=gathering, last=last
        )
        seconds = time.perf_counter() - began
        assert all(prefill.error is None for prefill in prefills), prefills[0].error
        return self.slowest(seconds), document, prefills

    def ask_apart(self, file: Path, questions: int) -> float:
        """Seconds for as many questions one after the other, each of which reads the document."""
        return sum(self.ask_together(file, 1)[0] for _ in range(questions))

    def hold(self, file: Path) -> None:
        """Say what every rank holds after a question, over its share of all keys and values."""
        device, share = self.loaded.device, self.size / self.world.size
        self.ask_together(file, 1)  # what is made once is made
        gc.collect()
        reset_peak(device)  # and what the heap keeps goes back
        before = held_bytes(device)
        _, document, prefills = self.ask_together(file, 1)
        counts = {"in_tensors": tensor_bytes(prefills, document)}
        counts |= {"resident": held_bytes(device) - before, "at_most": peak_bytes(device) - before}
        over = {name: [round(each / share, 3) for each in self.everyone(count)] for name, count in counts.items()}
        self.say("held on each rank that asks together, over 1 / ranks of all keys and values", over)

    def read(self, file: Path) -> tuple[float, float]:
        """Seconds to read keys and values with their checksums, and as many bytes with np.fromfile."""
        kv = stored_in(file)
        began = time.perf_counter()
        for layer in kv.layers:
            kv.read(layer)
        ours = time.perf_counter() - began
        began = time.perf_counter()
        np.fromfile(file, np.uint8, self.size)
        return ours, time.perf_counter() - began


def pieces_in(file: Path) -> Sequence[Piece]:
    """Locate the document's keys and values."""
    return open_results(file.parent, verify=False).places["document"].pieces


def stored_in(file: Path) -> KVReader:
    """Open the document's keys and values, for as long as the process runs."""
    return KVReader("document", pieces_in(file))


def ratio(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Ratios of pairs, and the best and median of both."""
    ratios = sorted(one / other for one, other in pairs)
    columns = list(zip(*pairs, strict=True))
    return {
        "ratio_of_pairs": [round(ratios[0], 3), round(statistics.median(ratios), 3), round(ratios[-1], 3)],
        "best_s": [round(min(column), 4) for column in columns],
        "median_s": [round(statistics.median(column), 4) for column in columns],
    }


def run(bench: Bench, wanted: set[str]) -> None:
    """Measure what is wanted, of `WHAT`."""
    repeats = range(bench.options.repeats)
    if wanted != {"compressed"}:
        bench.fresh()
    if "write" in wanted:
        bench.write(True)
        bench.say(
            "writing keys and values, against not", ratio([(bench.write(True), bench.write(False)) for _ in repeats])
        )
    file = bench.store()
    if "ask" in wanted:
        bench.ask(file)
        for name, cold in (("warm", False), ("from disk", True)):
            asked = [(bench.fresh(), bench.ask(file, cold=cold)) for _ in repeats]
            bench.say(f"prefilling again, against asking what is stored, {name}", ratio(asked))
    if "read" in wanted and bench.world.rank == 0:
        bench.read(file)
        reads = [bench.read(file) for _ in range(4 * bench.options.repeats)]
        columns = zip(*reads, strict=True)
        best = {"best_gb_per_s": [round(bench.size / min(column) / 1e9, 2) for column in columns]}
        bench.say("reading with checksums, against np.fromfile", ratio(reads) | best)
    bench.world.barrier()
    if "sharded" in wanted:
        bench.hold(file)
        asked = [(bench.ask_apart(file, TOGETHER), bench.ask_together(file, TOGETHER)[0]) for _ in repeats]
        bench.say(f"{TOGETHER} questions by all ranks one at a time, against in a row", ratio(asked))
        asked = [(bench.fresh(), bench.ask_together(file, 1)[0]) for _ in repeats]
        bench.say("prefilling again, against asking by all ranks together, warm", ratio(asked))
    if "compressed" in wanted:
        bench.compare_compressed(file)


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = make_parser("ask", __doc__)
    parser.add_argument("folder", nargs="?", default=".")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--question", type=int, default=30)
    parser.add_argument("--budget", type=float, default=0.3, help="share of the tokens that KVzip keeps")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=",".join(WHAT), help="of " + ", ".join(WHAT))
    parser.add_argument("--model", default=DEFAULT_MODEL)
    options = parser.parse_args(arguments)
    wanted = set(options.only.split(","))
    if unknown := wanted - set(WHAT):
        parser.error(f"--only {min(unknown)}: expected some of {', '.join(WHAT)}")
    if not Path(options.folder).is_dir():
        parser.error(f"{options.folder} is no folder")
    world, _ = open_transport(connect(), "auto", torch.device("cpu"))
    folder = Path(share_json(world, on_root(world, lambda: tempfile.mkdtemp(dir=options.folder, prefix="bench-ask-"))))
    torch.set_num_threads(1)
    try:
        with opened_model(world, options.model) as options.model:
            run(Bench(options, world, folder), wanted)
    finally:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder)
