"""What Python programs may count on: the names and their parameters."""

from __future__ import annotations

import inspect

import pytest

import kvr_mpi

NAMES = {
    "Chain": ["model", "comm", "generation", "parallel", "say"],
    "ChainPrefill": None,
    "DocumentKV": None,
    "KvrError": None,
    "Results": None,
    "RunOutcome": None,
    "__version__": None,
    "open_results": ["paths", "verify", "partial"],
    "plan": ["job", "ranks", "hardware", "settings"],
    "run": ["job", "settings", "comm", "overwrite", "resume", "extend", "retry_failed", "time_limit"],
    "simulate": ["model", "hardware", "ranks", "contexts", "link_gigabytes_per_s"],
}
METHODS = {
    "Chain": {"close", "decode_rank", "encode", "generate", "prefill", "rank", "size", "tokenizer"},
    "ChainPrefill": {"bounds", "decode_rank", "ids", "logits", "seconds"},
    "DocumentKV": {"layers", "numpy", "text", "to_cache", "token_ids", "tokens"},
    "Results": {
        *("columns", "cost", "costs", "damaged", "gone", "header", "ids", "kv", "kv_bytes", "left", "missing", "of"),
        *("open", "paths", "place", "places", "read", "records", "software", "summary", "to_pandas", "unreadable"),
    },
    "RunOutcome": {"exit_code", "folder", "is_complete", "open"},
}


def test_the_names_are_these() -> None:
    assert sorted(kvr_mpi.__all__) == sorted(NAMES) and set(NAMES) <= set(dir(kvr_mpi))
    for name, parameters in NAMES.items():
        found = getattr(kvr_mpi, name)
        if parameters is not None:
            assert list(inspect.signature(found).parameters) == parameters, name
    for name, methods in METHODS.items():
        kind = getattr(kvr_mpi, name)
        public = {each for each in dir(kind) if not each.startswith("_")}
        assert public == methods - {"decode_rank", "rank", "size"} if name == "Chain" else public == methods, name


def test_a_name_that_is_not_there_is_told_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'opne_results'; it has Chain, .*open_results"):
        kvr_mpi.opne_results  # noqa: B018
