"""Compress prompts by every method and budget, and hold what follows against the full cache; print two tables.

    python -m benchmarks compress

Continuations are of the demo's own documents; needles are hidden among their sentences. HeadKV's profile is the mean of
what heads kept by Ada-SnapKV in prompts of another seed: published scores of this model there are none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.needles import KINDS, Needle
from benchmarks.options import make_parser
from benchmarks.quality import QualityBench
from kvr_mpi.cli.environment import read_environment
from kvr_mpi.cli.options import DEFAULT_MODEL
from kvr_mpi.compress.compression import Compression, open_compression
from kvr_mpi.compress.registry import METHODS
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.documents.encoding import encode_text
from kvr_mpi.documents.prompts import PromptText, make_frame
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.runtime.head_sample import retained_counts
from kvr_mpi.runtime.loading import load_on_all
from kvr_mpi.transport.local import LocalTransport

DOCUMENTS = Path(__file__).resolve().parents[1] / "jobs" / "demo"
PROFILE_BUDGET, PROFILE_PROMPTS = 256, 2


def settings_of(method: str, budget: int, observes: str, profile: Path, window: int) -> CompressSettings:
    """Take a method's defaults with a budget and a window."""
    own: dict[str, Any] = {"profile": str(profile)} if METHODS[method].needs_profile else {}
    if METHODS[method].observes:
        own["window"] = window
    return CompressSettings(method=method, budget=budget, observes=observes, **own)  # type: ignore[arg-type]


def needle_prompt(loaded: LoadedModel, needle: Needle) -> PromptText:
    """Put the text, the question and the beginning of the answer into a chat."""
    template = f"{{text}}\n\n{needle.question}"
    frame = make_frame(loaded.tokenizer, template, max_prompt_tokens=8192)
    found = frame.around(frame.text.encode(loaded.tokenizer, needle.text))
    return PromptText((*found.ids, *encode_text(loaded.tokenizer, needle.begins, "middle")), 0, found.text)


def needles(loaded: LoadedModel, count: int, tokens: int, seed: int) -> Iterator[tuple[Needle, PromptText]]:
    """So many prompts of each kind, of about so many tokens."""
    chance = random.Random(seed)
    text = " ".join(file.read_text() for file in sorted(DOCUMENTS.iterdir()))
    sentences = [one for one in re.split(r"(?<=[.!?])\s+", text) if 30 < len(one) < 300]
    for _ in range(count):
        for make in KINDS.values():
            begin, stretch, left = chance.randrange(len(sentences) // 2), [], tokens
            for sentence in sentences[begin:]:
                left -= len(encode_text(loaded.tokenizer, sentence))
                if left < 0:
                    break
                stretch.append(sentence)
            needle = make(chance, stretch)
            yield needle, needle_prompt(loaded, needle)


def make_profile(loaded: LoadedModel, tokens: int, path: Path) -> None:
    """Write down what heads keep, on average over some prompts of another seed."""
    compression = open_compression(CompressSettings(method="ada-snapkv", budget=PROFILE_BUDGET), loaded)
    prompts = [prompt for _, prompt in needles(loaded, PROFILE_PROMPTS, tokens, seed=1)]
    counts = np.mean(list(retained_counts(loaded, prompts, compression)), axis=0)
    path.write_text(json.dumps({"counts": counts.tolist(), "model": loaded.fingerprint, "source": "this bench"}))


def continuations(loaded: LoadedModel, given: argparse.Namespace, profile: Path) -> list[dict[str, Any]]:
    """Negative log-likelihood of what follows in real documents."""
    rows = []
    for file in sorted(DOCUMENTS.iterdir())[: given.documents]:
        ids = encode_text(loaded.tokenizer, file.read_text())
        cut = min(given.tokens, len(ids) - given.following)
        bench = QualityBench(
            loaded, PromptText(tuple(ids[:cut]), 0, (0, cut)), ids[cut:][: given.following], window=given.window
        )
        full = bench.measure(None)
        rows.append({"document": file.name, "method": "full", "budget": cut, "nll": full.nll})
        for method in METHODS:
            for budget in given.budgets:
                found = bench.measure(
                    open_compression(settings_of(method, budget, "question", profile, given.window), loaded)
                )
                row = {"document": file.name, "method": method, "budget": budget, "nll": found.nll}
                rows.append({**row, "more": found.nll - full.nll, "kept": found.kept})
        print(f"{file.name}: {cut} tokens, full {full.nll:.3f}", flush=True)
    return rows


def answers(loaded: LoadedModel, given: argparse.Namespace, profile: Path) -> list[dict[str, Any]]:
    """Needle answers, and the negative log-likelihood of the true ones."""
    rows = []
    for number, (needle, prompt) in enumerate(needles(loaded, given.needles, given.needle_tokens, seed=0)):
        truth = encode_text(loaded.tokenizer, needle.answer)
        bench = QualityBench(loaded, prompt, truth, window=given.window, answers=len(truth))

        def row(method: str, budget: int, observes: str, compression: Compression | None) -> dict[str, Any]:
            found = bench.measure(compression)  # noqa: B023  (called at once)
            about = {"prompt": number, "kind": needle.kind, "method": method, "budget": budget, "observes": observes}  # noqa: B023
            return {**about, "nll": found.nll, "answer": found.answer, "right": found.answer == tuple(truth)}  # noqa: B023

        full = row("full", prompt.tokens, "", None)
        rows.append(full)
        for method in METHODS:
            for budget in given.budgets:
                if budget >= prompt.text[1] or budget > given.largest:
                    continue
                for observes in ("question", "document"):
                    settings = settings_of(method, budget, observes, profile, given.window)
                    found = row(method, budget, observes, open_compression(settings, loaded))
                    found |= {"same": found["answer"] == full["answer"], "more": found["nll"] - full["nll"]}
                    rows.append(found)
        told = loaded.tokenizer.decode(full["answer"])
        print(f"{needle.kind}: {prompt.tokens} tokens, expected{needle.answer}, full cache says{told}", flush=True)
    return rows


def print_continuations(rows: list[dict[str, Any]], budgets: list[int]) -> None:
    """Mean over documents, and the spread over them."""
    full = statistics.mean(row["nll"] for row in rows if row["method"] == "full")
    print(
        f"\nnegative log-likelihood beyond the full cache's {full:.3f}, nats per token (standard error over documents)"
    )
    print("| method |" + "".join(f" {budget} |" for budget in budgets) + "\n|---|" + "---|" * len(budgets))
    for method in METHODS:
        cells = []
        for budget in budgets:
            more = [row["more"] for row in rows if row["method"] == method and row["budget"] == budget]
            error = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
            cells.append(f" {statistics.mean(more):+.3f} ({error:.3f}) |")
        print(f"| {method} |" + "".join(cells))


def print_answers(rows: list[dict[str, Any]], budgets: list[int]) -> None:
    """Shares of right answers and of answers that are the full cache's, and the true ones' likelihood."""
    full = [row for row in rows if row["method"] == "full"]
    by_kind = [f"{kind} {sum(row['right'] for row in full if row['kind'] == kind)}" for kind in KINDS]
    right = sum(row["right"] for row in full)
    print(f"\nfull cache: {right} of {len(full)} right ({', '.join(by_kind)}); nll {_mean(full, 'nll'):.3f}")
    print("right / as the full cache's / nll of the true answer beyond the full cache's")
    kinds = [(observes, budget) for observes in ("question", "document") for budget in budgets]
    print("| method |" + "".join(f" {observes}, {budget} |" for observes, budget in kinds) + "\n|---|", end="")
    print("---|" * len(kinds))
    for method in METHODS:
        cells = []
        for wanted in kinds:
            some = [row for row in rows if row["method"] == method and (row["observes"], row["budget"]) == wanted]
            right, same = sum(row["right"] for row in some), sum(row["same"] for row in some)
            cells.append(f" {right} / {same} / {_mean(some, 'more'):+.2f} |" if some else " - |")
        print(f"| {method} |" + "".join(cells))


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(float(row[name]) for row in rows)


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = make_parser("compress", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="before a continuation, at most")
    parser.add_argument("--following", type=int, default=129, help="tokens of a continuation")
    parser.add_argument("--needles", type=int, default=6, help="prompts of each kind")
    parser.add_argument("--needle-tokens", type=int, default=1000, help="of a text around needles, about")
    parser.add_argument("--largest", type=int, default=512, help="budget for needles")
    parser.add_argument("--window", type=int, default=64, help="of the methods that observe")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="file for all figures")
    given = parser.parse_args(arguments)
    began = time.perf_counter()
    cache_dir = read_environment().cache_dir
    loaded = load_on_all(
        LocalTransport(), given.model, dtype="float32", device="cpu", offline=True, cache_dir=cache_dir
    )
    torch.set_num_threads(given.threads)
    prepare_model(loaded.model, chain=True)
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "heads.json"
        make_profile(loaded, given.needle_tokens, profile)
        continued = continuations(loaded, given, profile)
        if continued:
            print_continuations(continued, given.budgets)
        answered = answers(loaded, given, profile)
        if answered:
            print_answers(answered, [budget for budget in given.budgets if budget <= given.largest])
    if given.json:
        Path(given.json).write_text(json.dumps({"continuations": continued, "answers": answered}))
    print(f"\n{loaded.name}, float32, {time.perf_counter() - began:.0f} s")
