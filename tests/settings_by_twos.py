"""Settings of jobs by name, and the errors about those that cannot be combined; for `test_settings_together`.

A setting says how answers are computed (`WAYS`), what is kept beside them (`KEPT`), or what is asked (`ASKED`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

Job = Mapping[str, Any]
NAMED = [{"name": name, "template": f"{{text}} {name}?"} for name in ("first", "second")]
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}'
)
SMALL = {"compress.method": "ada-snapkv", "compress.budget": 32, "compress.window": 8}
OBSERVED = {**SMALL, "compress.observes": "document"}
QUESTIONS = {
    "documents.path": "{stored}",
    "prompt.template": None,
    "questions.ask": ["Who saw it?"],
    "questions.reuse": "always",
}
SCORED = {"generation.score": [" yes", " Nobody had seen it"], "generation.max_new_tokens": None}
SAMPLED = {"generation.do_sample": True, "generation.temperature": 1.5}

WAYS: dict[str, Job] = {
    "chunks": {"parallel.chunk_tokens": 37},
    "ring": {"parallel.strategy": "ring"},
    "auto": {"parallel.strategy": "auto"},
    "single": {"parallel.strategy": "single"},
    "alone": {"parallel.ranks_per_chain": 1},
    "planned": {"parallel.ranks_per_chain": "auto"},
    "little": {"parallel.memory_gib": 0.0016},
    "heads": {"decode.mode": "head-parallel"},
    "heads-auto": {"decode.mode": "auto"},
    "pages": {},
    "report": {"report.trace": True, "report.metrics": True},
    "resumed": {},
}
KEPT: dict[str, Job] = {
    "kv": {"output.kv": True},
    "sharded": {"output.kv": "sharded"},
    "reuse": {"documents.reuse": "{stored}"},
    "logprobs": {"generation.logprobs": True, "generation.top_logprobs": 2},
}
ASKED: dict[str, Job] = {
    "prompts": {"prompt.template": None, "prompts": NAMED},
    "questions": QUESTIONS,
    "questions-sharded": {**QUESTIONS, "questions.sharded": True},
    "questions-compressed": {**QUESTIONS, "documents.path": "{compressed}"},
    "split": {"prompt.too_long": "split", "prompt.max_tokens": 250},
    "requests": {"documents.path": "{requests}", "documents.format": "openai-batch", "prompt.template": None},
    "compress": SMALL,
    "observed": OBSERVED,
    "score": SCORED,
    "score-column": {
        "documents.path": "{rows}",
        "generation.score_column": "choices",
        "generation.max_new_tokens": None,
    },
    "samples": {**SAMPLED, "generation.n": 2},
    "schema": {"generation.json_schema": SCHEMA, "generation.max_new_tokens": 16},
    "adapter": {"model.adapter": "{adapter}"},
}
SETTINGS = {**WAYS, **KEPT, **ASKED}
RUNS: dict[str, Job] = {
    "stored": {"output.kv": True},
    "compressed": {"output.kv": True, **OBSERVED},
}

STORING, SPREAD = "kv sharded", "sharded questions-sharded"
ASKING = "questions questions-compressed"
SCORES, COMPRESSED, LOADING = "score score-column", "compress observed", f"reuse {ASKING}"
# Names on both sides, and what is said of each pair of them; the first line that fits.
REFUSED: list[tuple[str, str, str]] = [
    (STORING, "requests", "output.kv = (true|'sharded') cannot be combined with documents.format = 'openai-batch'"),
    (STORING, "prompts", r"output.kv = (true|'sharded') cannot be combined with \[\[prompts\]\]"),
    (STORING, "questions-sharded", "output.kv cannot be combined with questions.sharded"),
    ("sharded", ASKING, "'sharded' needs parallel.strategy = 'kvr' and a job without questions"),
    ("sharded", "ring auto single", "'sharded' needs parallel.strategy = 'kvr'"),
    ("kv", "questions-compressed", "questions about doc-.*: it is compressed"),
    ("kv", "samples", "output.kv = true, which stores the keys of only one answer"),
    ("sharded", COMPRESSED, "compression chooses among all tokens on one rank"),
    (SPREAD, "score", "cannot be combined with generation.score yet"),
    (SPREAD, "score-column", "cannot be combined with generation.score_column yet"),
    (SPREAD, "samples", "cannot be combined with generation.n yet"),
    (SPREAD, "schema", "cannot be combined with generation.json_schema yet"),
    ("reuse", f"{ASKING} questions-sharded", "documents.reuse cannot be combined with questions"),
    ("reuse", "prompts", r"documents.reuse cannot be combined with \[\[prompts\]\]"),
    (f"{LOADING} questions-sharded", COMPRESSED, "compression also needs the queries"),
    (f"{LOADING} questions-sharded", "adapter", "did not compute the keys and values .* different weights"),
    (f"{ASKING} questions-sharded", "split", "prompt.too_long cannot be combined with questions"),
    (f"{ASKING} questions-sharded", "prompts", r"cannot be combined with \[\[prompts\]\]"),
    (f"{ASKING} questions-sharded", "ring single", "strategy = '(ring|single)' cannot be combined with questions"),
    (f"{ASKING} questions-sharded", "resumed", "documents.shard cannot be combined with questions"),
    ("questions-sharded", "planned", "ranks_per_chain = 'auto', .* cannot be combined with questions.sharded"),
    (ASKING, "planned", "ranks_per_chain = 'auto', .* cannot be combined with questions"),
    ("prompts", "planned", r"ranks_per_chain = 'auto' cannot be combined with \[\[prompts\]\]"),
    ("prompts", "requests", r"'openai-batch' cannot be combined with \[\[prompts\]\]"),
    ("logprobs", SCORES, "generation.logprobs is for the tokens of an answer"),
    ("split", "score", "too_long = 'split' cannot be combined with generation.score yet"),
    ("split", "score-column", "too_long = 'split' cannot be combined with generation.score_column yet"),
    ("split", "samples", "too_long = 'split' cannot be combined with generation.n yet"),
    ("split", "requests", "prompt.too_long cannot be combined with documents.format = 'openai-batch'"),
    ("requests", "observed", "rows of documents.format = 'openai-batch' do not say"),
    ("requests", "score", "'openai-batch' cannot be combined with generation.score yet"),
    (COMPRESSED, SCORES, r"\[compress\] cannot be combined with generation.score"),
    (COMPRESSED, "single", "strategy = 'single' decodes from transformers' own cache"),
    (SCORES, "samples", "generation.n = 2: without"),
    (SCORES, "schema", "asks for (none|one)"),
    ("score", "score-column", "exclude each other"),
    ("chunks", "ring single", "chunk_tokens is for chains"),
    ("heads", "single", "'single' decodes from transformers' own cache"),
    ("heads", "sharded questions-sharded", "ranks already decode together"),
    ("heads", "kv", "output.kv = true stores the cache of one rank"),
    ("heads", f"logprobs samples schema {SCORES}", "not supported yet by ranks that share heads"),
]


def merged(names: Collection[str]) -> dict[str, Any] | None:
    """All settings of some names; None if two of them say different things of one key."""
    found: dict[str, Any] = {}
    for name in names:
        for key, value in SETTINGS[name].items():
            if found.setdefault(key, value) != value:
                return None
    return found


def written(job: Job) -> str:
    def as_toml(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            tables = (", ".join(f"{key} = {json.dumps(one)}" for key, one in table.items()) for table in value)
            return "[" + ", ".join(f"{{{table}}}" for table in tables) + "]"
        return json.dumps(value)

    return "\n".join(f"{key} = {as_toml(value)}" for key, value in job.items() if value is not None)


def expected(pair: Collection[str]) -> str | None:
    """What a pair's refusal says; None if it is to be run."""
    one, two = pair
    for left, right, said in REFUSED:
        if (one in left.split() and two in right.split()) or (two in left.split() and one in right.split()):
            return said
    return None
