"""Head profiles: how many tokens each KV head keeps, measured or derived from published scores.

A profile is the mean over the compression of one or more texts. Published scores of heads are converted to counts by
the rule of their method (`counts_from_scores`, `counts_from_gates`); the profile's `source` names the rule.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvr_mpi.errors import DataError, MissingError

Counts = npt.NDArray[np.float64]
# HeadKV (Fu et al. 2024), as published: of each head's budget beyond the window, 1 / beta goes into a pool, which is
# distributed by scores over all heads of the model; the last tokens of the prompt are always kept.
HEADKV_BETA, HEADKV_WINDOW = 1.2, 8
# DuoAttention (Xiao et al. 2024): a retrieval head keeps everything, the others sinks and recent tokens.
DUO_SHARE, DUO_FULL, DUO_OTHERS = 0.5, 8192, 384
MAX_FILE_BYTES, MAX_LAYERS, MAX_HEADS = 64 << 20, 1024, 4096


@dataclass(frozen=True, slots=True, eq=False)
class HeadProfile:
    """Tokens kept by each head (layers, kv_heads).

    counts : (layers, kv_heads).
    source : its origin, and the rule for its counts.
    model : fingerprint of the model it was measured on; empty: not known.
    """

    counts: Counts
    source: str
    model: str = ""


def counts_from_scores(scores: Counts, kv_heads: int, budget: int, window: int = HEADKV_WINDOW) -> Counts:
    """Convert scores of query heads to counts as HeadKV divides its budget, averaging over each KV head's queries.

    HeadKV's own code has a budget per query head; here it is per KV head, which determines memory and time.

    scores : (layers, query heads), not negative.
    budget : mean count of a KV head, including the window.

    Raises `DataError` if the query heads are not a multiple of the KV heads, or the budget is no larger than the
    window.
    """
    layers, heads = scores.shape
    if kv_heads < 1 or heads % kv_heads:
        raise DataError(f"{heads} query heads cannot be divided over {kv_heads} KV heads")
    if budget <= window:
        raise DataError(f"a budget of {budget} is no larger than the window of {window} tokens that every head keeps")
    grouped = scores.reshape(layers, kv_heads, -1).mean(2)
    if not grouped.sum() > 0:
        raise DataError("all scores are 0; expected some heads to matter")
    pool = (budget - window) / HEADKV_BETA
    counts: Counts = window + (budget - window - pool) + grouped / grouped.sum() * pool * grouped.size
    return counts


def counts_from_gates(gates: Counts) -> Counts:
    """Convert DuoAttention's gates to counts: a fraction of the heads keeps `DUO_FULL` tokens, the others fewer."""
    counts = np.full(gates.size, float(DUO_OTHERS))
    counts[np.argsort(-gates.ravel(), kind="stable")[: round(DUO_SHARE * gates.size)]] = DUO_FULL
    return counts.reshape(gates.shape)


def read_profile(
    path: Path, *, budget: int = 512, kv_heads: int | None = None, window: int = HEADKV_WINDOW
) -> HeadProfile:
    """Read a profile: ours, HeadKV's scores (``{"layer-head": [scores]}``), or a table of DuoAttention's gates.

    `budget`, `kv_heads` and `window` are for HeadKV's scores; `kv_heads` defaults to a quarter of the query heads, as
    in Llama 3 8B. Raises `DataError` for any other file.
    """
    if not path.is_file():
        raise MissingError(f"{path}: no such file; expected a head profile (.json or .tsv)")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise DataError(f"{path} has {path.stat().st_size} bytes, more than a head profile can have ({MAX_FILE_BYTES})")
    try:
        if path.suffix == ".tsv":
            gates = _checked(np.loadtxt(path, ndmin=2, dtype=np.float64))
            rule = f"DuoAttention's gates: the upper {DUO_SHARE:.0%} keep {DUO_FULL} tokens, the others {DUO_OTHERS}"
            return HeadProfile(counts_from_gates(gates), f"{path.name}, {rule}")
        stored = json.loads(path.read_text())
        if "counts" in stored:
            counts = _checked(np.array(stored["counts"], dtype=np.float64))
            return HeadProfile(counts, str(stored.get("source", path.name)), str(stored.get("model", "")))
        scores = _checked(_scores(stored))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise DataError(f"{path} is not a head profile: {error}") from error
    groups = kv_heads or max(1, scores.shape[1] // 4)
    rule = f"HeadKV's scores, mean over a KV head's queries, budget {budget}, beta {HEADKV_BETA}, window {window}"
    return HeadProfile(counts_from_scores(scores, groups, budget, window), f"{path.name}, {rule}")


def similarities(counts: Counts) -> tuple[list[float], list[float]]:
    """Return cosines of each document's counts (layers, kv_heads) with the others' mean, raw and mean-centred.

    FairKV's Table 1 has raw cosines. These are always near 1, since all counts are positive; mean-centred cosines show
    whether the same heads keep more. There must be two documents or more.
    """
    flat = counts.reshape(len(counts), -1)
    others = (flat.sum(0) - flat) / (len(flat) - 1)
    return _cosines(flat, others), _cosines(flat - flat.mean(1, keepdims=True), others - others.mean(1, keepdims=True))


def _cosines(some: Counts, others: Counts) -> list[float]:
    """Return the cosine between rows of two matrices; 0 where a row is zero."""
    sizes = np.linalg.norm(some, axis=1) * np.linalg.norm(others, axis=1)
    return [float(product / size) if size else 0.0 for product, size in zip((some * others).sum(1), sizes, strict=True)]


def _scores(stored: dict[str, Any]) -> Counts:
    """Return scores (layers, query heads), each the mean of a head's tests."""
    if not all(stored.values()):
        raise ValueError("a head has no scores")
    places = {tuple(map(int, name.split("-"))): np.mean(np.asarray(tests, float)) for name, tests in stored.items()}
    layers, heads = (1 + max(place[axis] for place in places) for axis in (0, 1))
    if len(places) != layers * heads or layers > MAX_LAYERS or heads > MAX_HEADS:
        raise ValueError(f"{len(places)} heads are named; expected {layers} layers of {heads} heads")
    scores = np.zeros((layers, heads))
    for place, score in places.items():
        scores[place] = score
    return scores


def _checked(values: Counts) -> Counts:
    if values.ndim != 2 or not values.size or values.shape[0] > MAX_LAYERS or values.shape[1] > MAX_HEADS:
        raise ValueError(f"its shape is {values.shape}; expected layers and heads")
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError("a value is negative or not finite")
    return values
