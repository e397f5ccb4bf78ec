"""Heads of a group keep the tokens that they keep on one process, also where all heads of a layer compete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_groups import ids_of, make_folder, on_groups

from kvr_mpi.compress.compression import RetainedSize, open_compression, size_of
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.errors import ConfigError
from kvr_mpi.model import LoadedModel, load_model
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.setup.job_ranks import JobRanks
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import LocalTransport

IDS = ids_of(160)
TEXT = (4, 160)
WINDOWED = {"budget": 48, "window": 16}
METHODS: dict[str, dict[str, Any]] = {
    "ada-snapkv": WINDOWED,
    "pyramidkv": WINDOWED,
    "streaming-llm": {"budget": 48},
    "headkv": WINDOWED,
}


def settings_of(method: str, folder: Path) -> CompressSettings:
    """Settings of a method; of one that goes by a profile, scores of query heads of which the last retrieve most."""
    settings = {"method": method, **METHODS[method]}
    if method == "headkv":
        scores = {f"{layer}-{head}": [head + layer / 2] for layer in range(3) for head in range(6)}
        settings["profile"] = str(folder / "scores.json")
        Path(settings["profile"]).write_text(json.dumps(scores))
    return CompressSettings.model_validate(settings)


def keep(
    loaded: LoadedModel, chain: Transport, settings: CompressSettings
) -> tuple[list[list[list[int]]], RetainedSize | None]:
    """Prefill and compress a prompt; of each layer the positions of this rank's heads, and how much all heads keep."""
    compression = open_compression(settings, loaded)
    partition, window = Partition.even(len(IDS), chain.size), compression.observed_of(len(IDS), TEXT)
    options: Any = {"window": window, "retain": compression.retain(len(IDS), TEXT), "reserve_tokens": 4}
    cache = prefill_kvr(loaded, IDS, partition, chain, **options).cache
    if cache is None or not cache.is_decode_rank:
        return [], None
    size = size_of(loaded, cache, "method") if cache.is_ragged else None
    kept = [[head.tolist() for head in layer.positions] for layer in cache.layers if layer.is_ragged]
    return kept, size


@pytest.mark.parametrize("method", METHODS)
def test_heads_of_a_group_keep_what_those_of_one_process_keep(tmp_path: Path, method: str) -> None:
    folder, _ = make_folder(tmp_path / "llama", "llama")
    loaded = load_model(str(folder), dtype="float32", device="cpu", cache_dir=folder)
    prepare_model(loaded.model, chain=True)
    settings = settings_of(method, tmp_path)
    wanted, size = keep(loaded, LocalTransport(), settings)

    def work(ranks: JobRanks, loaded: LoadedModel) -> Any:
        return keep(loaded, ranks.lane, settings)

    *_, (first, one), (second, other) = on_groups(folder, 2, 2, work)
    assert [low + high for low, high in zip(first, second, strict=True)] == wanted != []
    assert one == other == size, "what is told of is of all heads"
    if method in ("ada-snapkv", "headkv"):
        assert any(len(low) != len(high) for low, high in wanted), "else heads need not know of each other"


def test_heads_that_several_ranks_have_are_not_compressed(tmp_path: Path) -> None:
    """Each rank would choose by some of the queries, and keep other tokens of the same head."""
    folder, _ = make_folder(tmp_path / "llama", "llama")

    def work(ranks: JobRanks, loaded: LoadedModel) -> str:
        with pytest.raises(ConfigError, match="choose parallel.tensor_parallel <= 2"):
            keep(loaded, ranks.lane, settings_of("ada-snapkv", tmp_path))
        return "refused"

    assert on_groups(folder, 1, 6, work) == ["refused"] * 6
