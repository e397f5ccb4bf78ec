"""The table of architectures, as docs/architectures.md has it."""

from __future__ import annotations

import collections
import datetime
import re
from collections.abc import Sequence

from benchmarks.architectures import CLASSES, NOT_HERE, REFUSED, Entry, Verdict

# Groups of strategies as the table names them, by how their names begin.
STRATEGIES = ("chain", "ring", "tsp-causal", "tsp-dense", "prefix", "packed")

HEAD = """# Architectures

Written by `python -m benchmarks architectures` ({versions}, {date}); do not edit.

Every causal language model that transformers knows, tiny and with random weights, and variants of some, against plain
transformers in float32: prompts of 90 tokens, longer than every window, chunk and rotary threshold in them; chains of
1 to 4 ranks with uneven slices and slices of one token, ring and TSP on 2 and 3, instructions computed once (prefix),
five documents packed in one row. Logits, keys, values and the logits after up to 16 greedy tokens agree within 1e-4
of their spread, and the tokens are the same. Random weights show that the arithmetic is that of transformers; they say
nothing of a model's answers.

- **exact (fast)**: attention runs in parts, as they arrive.
- **exact (generic)**: attention runs in the model's own code, on a layer's whole prefix.
- **refused**: `kvr-run` says so before a document is read; the reason is what it says.
- **not instantiable here**: transformers itself does not build it small, or without a package that is not installed.
- **WRONG**: passed the self-check and differs. **TRACEBACK**: ended with an exception that is no message.

"""


def render(entries: dict[str, Entry], verdicts: Sequence[Verdict], versions: str, date: datetime.date) -> str:
    """Render the table; entries that were not judged are left out."""
    found = {verdict.name: verdict for verdict in verdicts}
    own = [found[name] for name, entry in entries.items() if name in found and not entry.is_variant]
    variants = [found[name] for name, entry in entries.items() if name in found and entry.is_variant]
    text = HEAD.format(versions=versions, date=date.isoformat())
    text += "| class | of the mapping | variants |\n|---|---|---|\n"
    counts = [collections.Counter(verdict.kind for verdict in each) for each in (own, variants)]
    for kind in CLASSES:
        text += f"| {kind} | {counts[0][kind]} | {counts[1][kind]} |\n"
    text += f"| all | {len(own)} | {len(variants)} |\n"
    for title, rows in (("The mapping", own), ("Variants", variants)):
        if rows:
            text += f"\n## {title}\n\n| name | architecture | class | strategies | remark |\n|---|---|---|---|---|\n"
            text += "".join(_row(verdict) for verdict in rows)
    return text


def _row(verdict: Verdict) -> str:
    cells = [f"`{verdict.name}`", verdict.architecture or "-", verdict.kind, _strategies(verdict), _remark(verdict)]
    return f"| {' | '.join(_cell(cell) for cell in cells)} |\n"


def _strategies(verdict: Verdict) -> str:
    """Name those that are exact wherever they were tried."""
    if verdict.kind in (REFUSED, NOT_HERE):
        return "-"
    exact = [name for name in STRATEGIES if any(_is_of(name, each) for each in verdict.exact)]
    exact = [name for name in exact if not any(_is_of(name, each) for each in verdict.refused)]
    left_out = [name for name in STRATEGIES if name not in exact]
    if not left_out:
        return "all"
    return f"all but {', '.join(left_out)}" if len(left_out) <= 2 else ", ".join(exact) or "-"


def _remark(verdict: Verdict) -> str:
    """Say why it is of its class, or why a strategy is not for it."""
    if verdict.reason:
        return verdict.reason
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    for name, reason in verdict.refused.items():
        group = next((each for each in STRATEGIES if _is_of(each, name)), None)
        if group is not None and group not in reasons[reason]:
            reasons[reason].append(group)
    return "; ".join(f"{', '.join(groups)}: {reason}" for reason, groups in reasons.items())


def _is_of(strategy: str, name: str) -> bool:
    return name.split(" ")[0] == strategy and not (strategy == "packed" and "prefix" in name)


def _cell(text: str) -> str:
    """Keep a text within one cell of a table."""
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 300 else text[:297] + "..."
