"""Jobs of settings by twos, what they leave, and whether that is what the same settings leave on one rank.

For `test_settings_together`, and on pretended GPUs. A setting says how answers are computed (`WAYS`), what is kept
beside them (`KEPT`), or what is asked (`ASKED`); which pairs are refused is in `kvr_mpi.job.combinations`.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from made_adapters import base_of, save_adapter
from made_jobs import TEXT, plain_job, toml_of
from made_runs import stored_layers

from kvr_mpi.errors import EXIT_CONFIG, EXIT_OK
from kvr_mpi.job import JobSpec
from kvr_mpi.job.combinations import refusals
from kvr_mpi.model import LoadedModel
from kvr_mpi.runtime import prepare
from kvr_mpi.runtime.prepare import try_rows
from kvr_mpi.store.record import Record
from kvr_mpi.store.results import open_results

Job = Mapping[str, Any]
NAMED = {name: f"{{text}} {name}?" for name in ("first", "second")}
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}'
)
SMALL = {"compress.method": "ada-snapkv", "compress.budget": 32, "compress.window": 8}
OBSERVED = {**SMALL, "compress.observes": "document"}
QUESTIONS = {"documents.path": "{stored}", "prompt.template": None, "questions.ask": ["Who saw it?"]}
SCORED = {"generation.score": [" yes", " Nobody had seen it"], "generation.max_new_tokens": None}
SAMPLED = {"generation.temperature": 1.5}

WAYS: dict[str, Job] = {
    "chunks": {"parallel.chunk_tokens": 37},
    "single": {"parallel.strategy": "single"},
    "alone": {"parallel.ranks_per_chain": 1},
    "groups": {"parallel.tensor_parallel": 2},
    "planned": {"parallel.ranks_per_chain": "auto"},
    "little": {"parallel.memory_gib": 0.0016},
    "heads": {"decode.mode": "head-parallel"},
    "heads-auto": {"decode.mode": "auto"},
    "pages": {},
    "report": {"output.trace": True},
    "resumed": {},
}
KEPT: dict[str, Job] = {
    "kv": {"output.kv": True},
    "sharded": {"output.kv": "sharded"},
    "reuse": {"documents.reuse": "{stored}"},
    "logprobs": {"generation.logprobs": 2},
}
ASKED: dict[str, Job] = {
    "prompts": {"prompt.template": NAMED},
    "questions": QUESTIONS,
    "questions-sharded": {**QUESTIONS, "parallel.ranks_per_chain": "all"},
    "questions-compressed": {**QUESTIONS, "documents.path": "{compressed}"},
    "split": {"prompt.too_long": "split", "prompt.max_tokens": 250},
    "coverage": {"prompt.min_coverage": 0.01},
    "requests": {"documents.path": "{requests}", "documents.format": "openai-batch", "prompt.template": None},
    "compress": SMALL,
    "observed": OBSERVED,
    "rolling": {"cache.kind": "streaming-llm", "cache.tokens": 40, "parallel.chunk_tokens": 16},
    "score": SCORED,
    "score-column": {**SCORED, "documents.path": "{rows}", "generation.score": "choices"},
    "samples": {**SAMPLED, "generation.n": 2},
    "schema": {"generation.json_schema": SCHEMA, "generation.max_new_tokens": 16},
    "adapter": {"model.adapter": "{adapter}"},
    "embedding": {"output.embedding": "mean", "generation.max_new_tokens": None, "documents.format": "text"},
    "text-logprobs": {"output.text_logprobs": True, "generation.max_new_tokens": None},
}
SETTINGS = {**WAYS, **KEPT, **ASKED}
RUNS: dict[str, Job] = {
    "stored": {"output.kv": True},
    "compressed": {"output.kv": True, **OBSERVED},
}

# Pairs that are refused for what a run has stored, or on two ranks, which no table of settings knows; and what is said.
REFUSED_LATER = {
    frozenset(("alone", "groups")): "cannot be divided into tensor-parallel groups of 2",
    frozenset(("kv", "questions-compressed")): "questions about doc-.*: it is compressed",
    **{
        frozenset((name, "adapter")): "did not compute the keys and values .* different weights"
        for name in ("reuse", "questions", "questions-sharded", "questions-compressed")
    },
}


def merged(names: Collection[str]) -> dict[str, Any] | None:
    """All settings of some names; None if two of them say different things of one key."""
    found: dict[str, Any] = {}
    for name in names:
        for key, value in SETTINGS[name].items():
            if found.setdefault(key, value) != value:
                return None
    return found


def said_of(names: Collection[str], base: Job | None = None) -> list[str]:
    """What a job of these settings is refused with, as patterns; nothing if it runs.

    `base` has the job's other settings, and the values of those that name a place.
    """
    plain = {"prompt.template": "{text}", "generation.max_new_tokens": 6}
    job = {**plain_job("m", "c", "o"), **plain, **(base or merged(names) or {})}
    if "resumed" in names:
        job["documents.shard"] = "0/2"
    found = refusals(JobSpec.model_validate(tomllib.loads(toml_of(job))))
    otherwise = (said for pair, said in REFUSED_LATER.items() if pair <= set(names))
    return [*map(re.escape, found)] or list(otherwise)


def covering(
    pairs: Sequence[tuple[str, str]], refused: Collection[tuple[str, str]], most: int
) -> list[tuple[str, ...]]:
    """Put settings into as few jobs as come of taking the best one next, so that each pair that runs is in one."""
    runs = {frozenset(pair) for pair in pairs if pair not in refused}
    left, found = [frozenset(pair) for pair in pairs if pair not in refused], list[tuple[str, ...]]()
    while left:
        job = [name for name in SETTINGS if name in left[0]]
        while len(job) < most:
            open_pairs = set(left)
            fits = [
                name
                for name in SETTINGS
                if name not in job and all({name, one} in runs for one in job) and merged([*job, name]) is not None
            ]
            new = {name: sum({name, one} in open_pairs for one in job) for name in fits}
            best = max(fits, key=lambda name: new[name], default=None)
            if best is None or not new[best]:
                break
            job.append(best)
        found.append(tuple(job))
        left = [pair for pair in left if not pair <= set(job)]
    return found


# Jobs of several settings, what they leave, and whether that is right

RANKS = 2
TOLERANCE = 2e-3
# In these, weights are compared with those of a run: they are read first.
LATE = {"adapter"}


@dataclass
class Outcome:
    """What a job left: its exit code, what it said, and what is stored of each document."""

    code: int
    said: str
    records: dict[str, Record] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bench:
    """Runs jobs in one folder; each truth once."""

    folder: Path
    launch: Callable[..., Any]
    monkeypatch: pytest.MonkeyPatch
    base: dict[str, Any]
    places: dict[str, Path]
    truths: dict[frozenset[str], Outcome] = field(default_factory=dict)

    def run(self, names: Collection[str], ranks: int, more: Job | None = None) -> Outcome:
        out, path = self.folder / "out", self.folder / "job.toml"
        shutil.rmtree(out, ignore_errors=True)
        job = self.job(names, more)
        path.write_text(toml_of(job))
        with self.monkeypatch.context() as patch:
            if "pages" in names:
                patch.setattr(prepare, "try_rows", try_pages)
            arguments: list[Any] = [path]
            if "resumed" in names:
                path.write_text(toml_of({**job, "documents.shard": "0/2"}))
                begun = self.launch(ranks, [path])
                if not out.exists():
                    return Outcome(begun.returncode, begun.stderr)
                path.write_text(toml_of(job))
                arguments.append("--resume")
            done = self.launch(ranks, arguments)
        found = Outcome(done.returncode, done.stderr)
        if out.exists() and list(out.glob("*.h5")):
            found.records = {record.id: record for record in open_results(out)}
            found.kept = keys_and_values(out / "results.h5")
        return found

    def job(self, names: Collection[str], more: Job | None = None) -> dict[str, Any]:
        job = merged(names)
        assert job is not None
        job = {**self.base, "output.path": str(self.folder / "out"), **job, **(more or {})}
        return {key: self._place(value) for key, value in job.items()}

    def _place(self, value: Any) -> Any:
        """Fill in a folder or file; a run is made when it is first asked for."""
        name = value[1:-1] if isinstance(value, str) and value.startswith("{") else ""
        if name in RUNS and name not in self.places:
            place = self.folder / name
            done = self.run([], 1, {**RUNS[name], "output.path": str(place)})
            assert done.code == EXIT_OK, done.said
            self.places[name] = place
        return str(self.places[name]) if name in self.places else value

    def truth(self, names: Collection[str]) -> Outcome:
        known = frozenset(names)
        if known not in self.truths:
            self.truths[known] = self.run(known, 1)
        return self.truths[known]


def try_pages(spec: Any, loaded: LoadedModel, say: Any) -> tuple[str | None, bool]:
    """As on a GPU, without the trial of pages."""
    why, _ = try_rows(spec, loaded, say)
    return why, why is None and not spec.is_sharded and not spec.cache.is_rolling


def keys_and_values(path: Path) -> dict[str, Any]:
    found = {name: stored_layers(path, name) for name in open_results(path).ids()}
    return {name: layers for name, layers in found.items() if layers}


def differences(found: Outcome, truth: Outcome, *, error: float | None) -> list[str]:
    """Say what is not as it should be; also of what is kept, whose keys and values may be off by so much."""
    wrong = []
    if found.records.keys() != truth.records.keys():
        wrong.append(f"records of {sorted(found.records)}, not of {sorted(truth.records)}")
    for name in found.records.keys() & truth.records.keys():
        mine, other = found.records[name], truth.records[name]
        for key in ("status", "error", "token_ids", "answer", "finish_reason", "prompt_sha256", "prompt_tokens"):
            if getattr(mine, key) != getattr(other, key):
                wrong.append(f"{name}: {key} is {getattr(mine, key)!r}, not {getattr(other, key)!r}")
        if [one["token_ids"] for one in mine.sampled] != [one["token_ids"] for one in other.sampled]:
            wrong.append(f"{name}: other samples")
        if error is not None:
            wrong += told_differences(name, mine, other)
    if error is not None:
        torch.testing.assert_close(found.kept, truth.kept, atol=error, rtol=0)
    return wrong


def told_differences(name: str, mine: Record, other: Record) -> list[str]:
    wrong = []
    if mine.compression != other.compression:
        wrong.append(f"{name}: compression {mine.compression!r}, not {other.compression!r}")
    names = ("logprobs", "top_logprobs", "embedding", "text_logprobs")
    pairs: dict[str, Any] = {name: (getattr(mine, name), getattr(other, name)) for name in names}
    for number, (one, two) in enumerate(zip(mine.sampled, other.sampled, strict=True)):
        pairs[f"sample {number}"] = one.get("logprobs", ()), two.get("logprobs", ())
    if len(mine.scored) != len(other.scored):
        wrong.append(f"{name}: {len(mine.scored)} scores, not {len(other.scored)}")
    for number, (one, two) in enumerate(zip(mine.scored, other.scored, strict=False)):
        pairs[f"score {number}"] = one["token_logprobs"], two["token_logprobs"]
    for what, (one, two) in pairs.items():
        if tuple(one) != pytest.approx(tuple(two), abs=TOLERANCE):
            wrong.append(f"{name}: {what} {list(one)[:4]}, not {list(two)[:4]}")
    if mine.logprobs and len(mine.logprobs) != len(mine.token_ids):
        wrong.append(f"{name}: {len(mine.logprobs)} log-probabilities of {len(mine.token_ids)} tokens")
    return wrong


def prepare_places(folder: Path, model: Path) -> tuple[Path, dict[str, Any], Any, Any]:
    """Four documents of 20 to 370 tokens as texts, rows and requests, an adapter, and what is done already."""
    texts = {f"doc-{number}": f"Document {number}. " + TEXT * more for number, more in enumerate((1, 4, 9, 11))}
    (folder / "corpus").mkdir()
    for name, text in texts.items():
        (folder / "corpus" / f"{name}.txt").write_text(text)
    rows = [{"id": name, "text": text, "choices": [" yes", " no it is not"]} for name, text in texts.items()]
    requests = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": text, "max_tokens": 6}}
        for name, text in texts.items()
    ]
    for name, lines in (("rows", rows), ("requests", requests)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = {
        "model.path": str(model),
        "model.dtype": "float32",
        "model.kernels": "plain",  # nothing is measured: that is another test's, and takes time
        "parallel.partition": "even",
        "documents.path": str(folder / "corpus"),
        "prompt.template": "Summarise: {text} Summary:",
        "generation.max_new_tokens": 6,
    }
    places = {"rows": folder / "rows.jsonl", "requests": folder / "requests.jsonl", "adapter": folder / "adapter"}
    save_adapter(base_of(model), places["adapter"])
    return folder, base, places, {}


def check(bench: Bench, names: Collection[str]) -> None:
    found, refused = bench.run(names, RANKS), said_of(names, bench.job(names))
    if refused:
        assert not found.records and found.code == EXIT_CONFIG, found.said
        assert all(re.search(said, found.said) for said in refused), found.said
        assert LATE & set(names) or "loading" not in found.said, found.said
        return
    assert found.code == EXIT_OK, found.said
    shown = [name for name in names if name not in WAYS]
    wrong = differences(found, bench.truth(shown), error=TOLERANCE)
    asked = [name for name in shown if name in ASKED]
    wrong += differences(found, bench.truth(asked), error=None)
    assert not wrong, "\n".join(wrong)


PAIRS = [pair for pair in itertools.combinations(SETTINGS, 2) if merged(pair) is not None]
REFUSED = [pair for pair in PAIRS if said_of(pair)]
# One job of many settings shows many pairs at once.
TOGETHER = covering(PAIRS, REFUSED, most=12)
