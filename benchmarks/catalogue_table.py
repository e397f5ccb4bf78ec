"""What docs/how-it-works.md says of every architecture: one line for all that have the same in common."""

from __future__ import annotations

import collections
import datetime
import re
import textwrap
from collections.abc import Sequence

from benchmarks.architectures import CLASSES, FAST, GENERIC, NOT_HERE, REFUSED, Entry, Verdict

# Between these a page has the text.
BEGIN, END = "<!-- architectures -->", "<!-- end of architectures -->"
WRAPPER = textwrap.TextWrapper(120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
# Groups of strategies as the table names them, by how their names begin.
STRATEGIES = ("chain", "ring", "tsp", "prefix", "packed")

# What a reason says in a few words, by what it contains.
REASONS = {
    "cannot continue from its cache": "transformers cannot continue from its cache",
    "an indexer chooses": "sparse attention by an indexer",
    "it chooses which": "sparse attention by an indexer",
    "takes no cache": "takes no cache",
    "cache of its own": "its own cache",
    "forgets all but a window": "its cache and its mask disagree",
    "does not run as a chain": "a chain gives other logits",
    "cannot build a causal LM": "no causal model",
    "ignores as padding": "a padding token in the prompt",
    "own code fails": "transformers' own code fails",
    "cannot be run on one token": "fails with a cache",
    "requires the": "needs a package that is not installed",
}

HEAD = """Written by `python -m benchmarks architectures` ({versions}, {date}); do not edit.

Every causal language model of transformers, and variants of some, as tiny models with random weights, compared with
plain transformers in float32. Prompts have 90 tokens, more than every window, chunk and rotary threshold.
Logits, keys and values agree within 1e-4 of their spread, and up to 16 greedy tokens are the same. Random weights test
the arithmetic, not a model's answers.

| class | meaning | in the mapping | variants |
|---|---|---|---|
{counts}

Modes: `chain` (1 to 4 ranks, uneven slices, slices of one token), `prefix` (a common prefix is computed once),
`packed` (five documents in a row), and the alternatives `ring` and `tsp` (2 and 3 ranks).
"""
MEANINGS = {
    FAST: "attention runs in parts, as they arrive",
    GENERIC: "the model's own attention runs over the whole prefix of a layer",
    REFUSED: "`kvr-run` refuses it before it reads a document",
    NOT_HERE: "transformers cannot build a tiny one here",
}


def render(entries: dict[str, Entry], verdicts: Sequence[Verdict], versions: str, date: datetime.date) -> str:
    """Render the lists; entries that were not judged are left out."""
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
    for title, rows in (("In the mapping", own), ("Variants", variants)):
        alike = collections.defaultdict(list)
        for verdict in sorted(rows, key=lambda verdict: (CLASSES.index(verdict.kind), verdict.name)):
            alike[verdict.kind, _in_words(verdict)].append(verdict.name)
        text += f"\n{title}:\n\n" * bool(alike)
        for (kind, words), names in alike.items():
            listed = f"{len(names)} of them" if rows is variants and kind in (FAST, GENERIC) else ", ".join(names)
            text += WRAPPER.fill(f"- **{kind}: {words}**: {listed}") + "\n"
    return text


def put_into(page: str, text: str) -> str:
    """Return a page with the text between its marks."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{text}{END}{rest.partition(END)[2]}"


def _in_words(verdict: Verdict) -> str:
    return _cell(_short(verdict) if verdict.reason else _strategies(verdict))


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
    """Keep a text within a few words."""
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 60 else text[:57] + "..."
