"""Go on from the keys and values of a document that grew; print, and plot, what that takes against what was added.

    python -m benchmarks extend --lengths 1k,2k,4k --added 64,128,256,512

A grown document attends to all of the old one, so that each added token costs a step of the old length; nothing costs
what computing the old one again would. Each point is held against prefilling the whole text, measured beside it.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.options import make_parser
from benchmarks.plots import plot_extension
from kvr_mpi.cli.environment import read_environment
from kvr_mpi.cli.options import DEFAULT_MODEL
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import compute_prefix, prefill_kvr
from kvr_mpi.setup.loading import load_on_all
from kvr_mpi.transport.local import LocalTransport


def numbers(text: str) -> list[int]:
    """Read 1k,2k,300."""
    return [int(each[:-1]) * 1024 if each.endswith("k") else int(each) for each in text.split(",")]


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = make_parser("extend", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--lengths", type=numbers, default=[1024, 2048, 4096], help="of the document before")
    parser.add_argument("--added", type=numbers, default=[64, 128, 256, 512], help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--plot", type=Path, help="file for a plot (.png, .svg)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    alone, cache_dir = LocalTransport(), read_environment().machine.cache_dir
    loaded = load_on_all(alone, given.model, dtype="float32", device="cpu", offline=True, cache_dir=cache_dir)
    prepare_model(loaded.model, chain=True)
    rows: list[dict[str, float]] = []
    for known in given.lengths:
        ids = loaded.shape.sample_ids(known + max(given.added))
        prefix = compute_prefix(loaded, ids[:known])
        for added in given.added:
            prompt, whole = ids[: known + added], Partition((0, known + added))
            pairs = [
                [prefill_kvr(loaded, prompt, whole, alone, prefix=one).seconds for one in (prefix, None)]
                for _ in range(given.rounds)
            ]
            extend_s, again_s = (statistics.median(each) for each in zip(*pairs, strict=True))
            rows.append({"known": known, "added": added, "extend_s": extend_s, "again_s": again_s})
            print(
                f"{known:6d} tokens, {added:5d} added: {extend_s:7.3f} s, {1e3 * extend_s / added:6.2f} ms for each; "
                f"the whole again {again_s:7.3f} s"
            )
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1))
    if given.plot:
        plot_extension(rows, given.plot)
