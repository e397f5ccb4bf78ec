"""Compress prompts by every method and budget, and hold what follows against the full cache; print two tables.

    python -m benchmarks compress

Continuations are of the demo's own documents, or (`--questions`) a file's reference answers to its questions about its
texts; needles are hidden among the demo's sentences. HeadKV's profile is the mean of what heads kept by Ada-SnapKV in
prompts of another seed: published scores of this model there are none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from benchmarks.needles import KINDS, Needle
from benchmarks.options import make_parser
from benchmarks.pretrained import opened_model
from benchmarks.quality import QualityBench
from kvr_mpi.cli.environment import read_environment
from kvr_mpi.cli.options import DEFAULT_MODEL
from kvr_mpi.compress.compression import Compression, open_compression
from kvr_mpi.compress.registry import METHODS
from kvr_mpi.compress.repeating import INSTRUCTION
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


def compression_of(
    loaded: LoadedModel, method: str, budget: float, observes: str, profile: Path, window: int
) -> Compression:
    """Prepare a method with its defaults, a budget and a window."""
    rule, own, instruction = METHODS[method], dict[str, Any](), tuple[int, ...]()
    if rule.needs_profile:
        own["profile"] = str(profile)
    if rule.observes:
        own["window"] = window
    if rule.repeats:
        instruction = make_frame(loaded.tokenizer, "{text}", after=INSTRUCTION, max_prompt_tokens=8192).tail
    settings = CompressSettings(method=method, budget=budget, observes=observes, **own)  # type: ignore[arg-type]
    return open_compression(settings, loaded, instruction)


def asked(loaded: LoadedModel, text: str, question: str, begins: str = "", tokens: int | None = None) -> PromptText:
    """Put the text (its first tokens), a question and the beginning of the answer into a chat."""
    frame = make_frame(loaded.tokenizer, f"{{text}}\n\n{question}", max_prompt_tokens=8192)
    found = frame.around(frame.text.encode(loaded.tokenizer, text)[:tokens])
    return PromptText((*found.ids, *encode_text(loaded.tokenizer, begins, "middle")), 0, found.text)


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
            yield needle, asked(loaded, needle.text, needle.question, needle.begins)


def make_profile(loaded: LoadedModel, tokens: int, path: Path) -> None:
    """Write down what heads keep, on average over some prompts of another seed."""
    compression = open_compression(CompressSettings(method="ada-snapkv", budget=PROFILE_BUDGET), loaded)
    prompts = [prompt for _, prompt in needles(loaded, PROFILE_PROMPTS, tokens, seed=1)]
    counts = np.mean(list(retained_counts(loaded, prompts, compression)), axis=0)
    path.write_text(json.dumps({"counts": counts.tolist(), "model": loaded.fingerprint, "source": "this bench"}))


def passages(loaded: LoadedModel, given: argparse.Namespace) -> Iterator[tuple[str, PromptText, Sequence[int]]]:
    """Names, prompts, and what follows them: real documents, or a file's questions, the shortest text first."""
    if given.questions is None:
        for file in sorted(DOCUMENTS.iterdir())[: given.documents]:
            ids = encode_text(loaded.tokenizer, file.read_text())
            cut = min(given.tokens, len(ids) - given.following)
            yield file.name, PromptText(tuple(ids[:cut]), 0, (0, cut)), ids[cut:][: given.following]
        return
    asking = [json.loads(line) for line in Path(given.questions).read_text().splitlines()]
    for row in sorted(asking, key=lambda row: len(row["text"]))[: given.documents]:
        answer = encode_text(loaded.tokenizer, row["reference"], "middle")[: given.following]
        yield row["id"], asked(loaded, row["text"], row["query"], tokens=given.tokens), answer


def continuations(loaded: LoadedModel, given: argparse.Namespace, profile: Path) -> list[dict[str, Any]]:
    """Negative log-likelihood of what follows in real documents; prints a table after each one."""
    rows = []
    for name, prompt, following in passages(loaded, given):
        bench = QualityBench(loaded, prompt, following, window=given.window)
        full = bench.measure(None)
        about = {"document": name, "tokens": prompt.tokens}
        rows.append({**about, "method": "full", "budget": prompt.tokens, "nll": full.nll})
        if given.questions is not None:  # what the question alone says about its answer
            start, stop = prompt.text
            alone = PromptText((*prompt.ids[: start + 1], *prompt.ids[stop:]), 0, (start, start + 1))
            nll = QualityBench(loaded, alone, following, window=0).measure(None).nll
            rows.append({**about, "method": "none", "budget": 0, "nll": nll, "more": nll - full.nll})
        for method, observes in ways(given):
            for budget in given.budgets:
                compression = compression_of(loaded, method, budget, observes, profile, given.window)
                found = bench.measure(compression)
                row = {**about, "method": method, "observes": observes, "budget": budget, "nll": found.nll}
                rows.append({**row, "more": found.nll - full.nll, "kept": found.kept})
        print(f"\n{name}: {prompt.tokens} tokens, {len(following)} follow, full {full.nll:.3f}")
        print_continuations(rows, given)
        save(given, continuations=rows)
    return rows


def ways(given: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the methods, each with every place where its window can be."""
    return [
        (method, observes)
        for method in given.methods
        for observes in ("question", "document")
        if observes == "document" or not METHODS[method].repeats
    ]


def answers(loaded: LoadedModel, given: argparse.Namespace, profile: Path) -> list[dict[str, Any]]:
    """Needle answers, and the negative log-likelihood of the true ones."""
    rows = []
    for number, (needle, prompt) in enumerate(needles(loaded, given.needles, given.needle_tokens, seed=given.seed)):
        truth = encode_text(loaded.tokenizer, needle.answer)
        bench = QualityBench(loaded, prompt, truth, window=given.window, answers=len(truth))

        def row(method: str, budget: float, observes: str, compression: Compression | None) -> dict[str, Any]:
            found = bench.measure(compression)  # noqa: B023  (called at once)
            about = {"prompt": number, "kind": needle.kind, "method": method, "budget": budget, "observes": observes}  # noqa: B023
            return {**about, "nll": found.nll, "answer": found.answer, "right": found.answer == tuple(truth)}  # noqa: B023

        full = row("full", prompt.tokens, "", None)
        rows.append(full)
        for method, observes in ways(given):
            for budget in given.budgets:
                if budget >= prompt.text[1] or budget > given.largest:
                    continue
                compression = compression_of(loaded, method, budget, observes, profile, given.window)
                found = row(method, budget, observes, compression)
                found |= {"same": found["answer"] == full["answer"], "more": found["nll"] - full["nll"]}
                rows.append(found)
        told = loaded.tokenizer.decode(full["answer"])
        print(f"{needle.kind}: {prompt.tokens} tokens, expected{needle.answer}, full cache says{told}", flush=True)
    return rows


def print_continuations(rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """Mean over documents, and the spread over them."""
    full = statistics.mean(row["nll"] for row in rows if row["method"] == "full")
    print(f"negative log-likelihood beyond the full cache's {full:.3f}, nats per token (standard error over documents)")

    def cell(some: list[dict[str, Any]]) -> str:
        more = [row["more"] for row in some]
        error = statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
        return f"{statistics.mean(more):+.3f} ({error:.3f})"

    if none := [row for row in rows if row["method"] == "none"]:
        print(f"without the text: {cell(none)}")
    _print_table(rows, given, cell)
    sys.stdout.flush()


def print_answers(rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """Shares of right answers and of answers that are the full cache's, and the true ones' likelihood."""
    full = [row for row in rows if row["method"] == "full"]
    by_kind = [f"{kind} {sum(row['right'] for row in full if row['kind'] == kind)}" for kind in KINDS]
    right = sum(row["right"] for row in full)
    print(f"\nfull cache: {right} of {len(full)} right ({', '.join(by_kind)}); nll {_mean(full, 'nll'):.3f}")
    print("right / as the full cache's / nll of the true answer beyond the full cache's")

    def cell(some: list[dict[str, Any]]) -> str:
        right, same = sum(row["right"] for row in some), sum(row["same"] for row in some)
        return f"{right} / {same} / {_mean(some, 'more'):+.2f}"

    _print_table(rows, given, cell)


def _print_table(
    rows: list[dict[str, Any]], given: argparse.Namespace, cell: Callable[[list[dict[str, Any]]], str]
) -> None:
    """Print a line for each method and place of its window, with a cell for each budget."""
    print("| method | window |" + "".join(f" {budget} |" for budget in given.budgets))
    print("|---|---|" + "---|" * len(given.budgets))
    for method, observes in ways(given):
        own = [row for row in rows if row["method"] == method and row["observes"] == observes]
        cells = [[row for row in own if row["budget"] == budget] for budget in given.budgets]
        print(f"| {method} | {observes} |" + "".join(f" {cell(some)} |" if some else " - |" for some in cells))


def save(given: argparse.Namespace, **rows: list[dict[str, Any]]) -> None:
    """Write all figures to the file that was asked for."""
    if given.json:
        Path(given.json).write_text(json.dumps(rows))


def _budget(text: str) -> float:
    return float(text) if float(text) < 1 else int(text)


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(float(row[name]) for row in rows)


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = make_parser("compress", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument(
        "--budgets", type=_budget, nargs="+", default=[128, 256, 512, 1024], help="tokens; below 1: shares of a prompt"
    )
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="before a continuation, at most")
    parser.add_argument("--questions", help="JSONL with id, text, query and reference: continue with the reference")
    parser.add_argument("--following", type=int, default=129, help="tokens of a continuation, at most")
    parser.add_argument("--needles", type=int, default=6, help="prompts of each kind")
    parser.add_argument("--needle-tokens", type=int, default=1000, help="of a text around needles, about")
    parser.add_argument("--largest", type=int, default=512, help="budget for needles")
    parser.add_argument("--window", type=int, default=64, help="of the methods that observe")
    parser.add_argument("--seed", type=int, default=0, help="of needles")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", help="file for all figures")
    given = parser.parse_args(arguments)
    began = time.perf_counter()
    cache_dir = read_environment().cache_dir
    alone = LocalTransport()
    with opened_model(alone, given.model) as model:
        loaded = load_on_all(alone, model, dtype="float32", device="cpu", offline=True, cache_dir=cache_dir)
    torch.set_num_threads(given.threads)
    prepare_model(loaded.model, chain=True)
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "heads.json"
        if any(METHODS[method].needs_profile for method in given.methods):
            make_profile(loaded, given.needle_tokens, profile)
        continued = continuations(loaded, given, profile)
        answered = answers(loaded, given, profile)
        if answered:
            print_answers(answered, given)
    save(given, continuations=continued, answers=answered)
    print(f"\n{loaded.name}, float32, {time.perf_counter() - began:.0f} s")
