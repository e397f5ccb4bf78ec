"""The table of architectures, as docs/architectures.md has it."""

from __future__ import annotations

import collections
import datetime
import re
from collections.abc import Sequence

from benchmarks.architectures import CLASSES, FAST, GENERIC, NOT_HERE, REFUSED, Entry, Verdict

# Groups of strategies as the table names them, by how their names begin.
STRATEGIES = ("chain", "ring", "tsp", "prefix", "packed")

# What a reason says in a few words, by what it contains.
REASONS = {
    "cannot continue from its cache": "transformers cannot continue from its cache",
    "an indexer chooses": "sparse attention by an indexer",
    "it chooses which": "sparse attention by an indexer",
    "takes no cache": "takes no cache",
    "cache of its own": "a cache of its own",
    "forgets all but a window": "its cache and its mask disagree",
    "does not run as a chain": "a chain gives other logits",
    "cannot build a causal LM": "no causal model",
    "ignores as padding": "a padding token in the prompt",
    "own code fails": "transformers' own code fails",
    "cannot be run on one token": "fails with a cache",
    "requires the": "needs a package that is not installed",
}

HEAD = """# Architectures

Written by `python -m benchmarks architectures` ({versions}, {date}); do not edit.

Every causal language model that transformers knows, and variants of some, tiny and with random weights, compared with
plain transformers in float32. Prompts have 90 tokens, more than every window, chunk and rotary threshold in them.
Logits, keys and values agree within 1e-4 of their spread, and up to 16 greedy tokens are the same. Random weights test
the arithmetic, not a model's answers.

| class | meaning | in the mapping | variants |
|---|---|---|---|
{counts}

Strategies: `chain` (1 to 4 ranks, uneven slices, slices of one token), `ring` and `tsp` (2 and 3 ranks), `prefix` (a
common beginning is computed once), `packed` (five documents in a row).
"""
MEANINGS = {
    FAST: "attention runs in parts, as they arrive",
    GENERIC: "the model's own attention runs over the whole prefix of a layer",
    REFUSED: "`kvr-run` refuses it before it reads a document",
    NOT_HERE: "transformers does not build it small here",
}


def render(entries: dict[str, Entry], verdicts: Sequence[Verdict], versions: str, date: datetime.date) -> str:
    """Render the table; entries that were not judged are left out."""
    found = {verdict.name: verdict for verdict in verdicts}
    own = [found[name] for name, entry in entries.items() if name in found and not entry.is_variant]
    variants = [found[name] for name, entry in entries.items() if name in found and entry.is_variant]
    own_kinds, variant_kinds = (collections.Counter(verdict.kind for verdict in each) for each in (own, variants))
    counts = [
        f"| {kind} | {MEANINGS.get(kind, 'a bug')} | {own_kinds[kind]} | {variant_kinds[kind]} |"
        for kind in CLASSES
        if kind in MEANINGS or own_kinds[kind] or variant_kinds[kind]
    ]
    text = HEAD.format(versions=versions, date=date.isoformat(), counts="\n".join(counts))
    for title, rows in (("The mapping", own), ("Variants", variants)):
        if rows:
            text += f"\n## {title}\n\n| name | class | strategies, or why not |\n|---|---|---|\n"
            text += "".join(_row(verdict) for verdict in rows)
    return text


def _row(verdict: Verdict) -> str:
    kind = re.sub(r"exact \((.*)\)", r"\1", verdict.kind)
    cells = [f"`{verdict.name}`", kind, _short(verdict) if verdict.reason else _strategies(verdict)]
    return f"| {' | '.join(_cell(cell) for cell in cells)} |\n"


def _strategies(verdict: Verdict) -> str:
    """Name the strategies that are exact wherever they were tried."""
    exact = [name for name in STRATEGIES if any(_is_of(name, each) for each in verdict.exact)]
    exact = [name for name in exact if not any(_is_of(name, each) for each in verdict.refused)]
    left_out = [name for name in STRATEGIES if name not in exact]
    if not left_out:
        return "all"
    return f"all but {', '.join(left_out)}" if len(left_out) <= 2 else ", ".join(exact) or "-"


def _is_of(strategy: str, name: str) -> bool:
    return name.split(" ")[0].startswith(strategy) and not (strategy == "packed" and "prefix" in name)


def _short(verdict: Verdict) -> str:
    """Say a reason in a few words, or as it is where it has none."""
    other = "transformers fails to build it" if verdict.kind == NOT_HERE else verdict.reason
    return next((words for part, words in REASONS.items() if part in verdict.reason), other)


def _cell(text: str) -> str:
    """Keep a text within one line of a cell."""
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 60 else text[:57] + "..."
