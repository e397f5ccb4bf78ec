"""Jobs with ``model.stream_weights``: what the plain job stores, read block by block, once for many documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_jobs import spec_of, with_settings

import kvr_mpi
from kvr_mpi.errors import ConfigError
from kvr_mpi.model.streamed import StreamedWeights
from kvr_mpi.preflight.own_way_checks import check_streaming
from kvr_mpi.setup.streaming_weights import split_blocks
from kvr_mpi.store.folder import read_run
from kvr_mpi.store.outputs import Record

STREAMED = ("model.stream_weights=true", "model.device=cpu", "parallel.ranks_per_chain=1")


@pytest.fixture
def run(job: Path, tmp_path: Path, run_here: Any) -> Callable[..., tuple[dict[str, Record], str]]:
    """Run the job on some ranks; return its records, and the log."""

    def launch(name: str, *settings: str, ranks: int = 1) -> tuple[dict[str, Record], str]:
        done = run_here(ranks, [job, *with_settings(f"output.path={tmp_path / name}", *settings)])
        assert done.returncode == 0, done.stderr
        return {record.id: record for record in read_run(tmp_path / name)}, done.stderr

    return launch


def test_keys_and_values_are_those_of_the_plain_job(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    run_all = StreamedWeights.run_all

    def counted(weights: StreamedWeights, tasks: Any) -> Any:
        passes.append(len(tasks))
        return run_all(weights, tasks)

    monkeypatch.setattr(StreamedWeights, "run_all", counted)
    settings = ("generation.max_new_tokens=0", "output.kv=true")
    run("plain", *settings)
    _, log = run("streamed", *settings, *STREAMED)
    assert passes == [5], "all documents in one pass"
    assert "weights are streamed: " in log and "a pass reads 0.0" in log and "MB/s" in log
    plain, streamed = kvr_mpi.open_results(tmp_path / "plain"), kvr_mpi.open_results(tmp_path / "streamed")
    assert len(plain) == len(streamed) == 5
    for record in plain:
        truth, found = plain.kv(record.id), streamed.kv(record.id)
        assert truth.token_ids == found.token_ids and truth.layers.keys() == found.layers.keys()
        for layer, pair in truth.layers.items():
            for one, other in zip(pair, found.layers[layer], strict=True):
                assert torch.allclose(one, other, atol=1e-5)


def test_first_tokens_are_those_of_the_plain_job(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several passes, if a pass has no room for all."""
    monkeypatch.setattr("kvr_mpi.runtime.worker.MAX_SEQUENCES", 2)
    settings = ("generation.max_new_tokens=1", "generation.logprobs=true")
    plain, streamed = run("plain", *settings)[0], run("streamed", *settings, *STREAMED, ranks=2)[0]
    for name, record in plain.items():
        assert streamed[name].token_ids == record.token_ids and streamed[name].finish_reason == record.finish_reason
        assert streamed[name].logprobs == pytest.approx(record.logprobs, abs=1e-4)
        assert np.isfinite(record.logprobs).all() and len(record.token_ids) == 1


@pytest.mark.long
def test_scores_are_those_of_the_plain_job(run: Any) -> None:
    """One token's is known after the prompts' pass; several take one more."""
    settings = ("generation.max_new_tokens=0", "generation.score=[' the', ' the second boat']", "documents.limit=2")
    plain, streamed = run("plain", *settings)[0], run("streamed", *settings, *STREAMED)[0]
    for name, record in plain.items():
        assert [one["tokens"] for one in record.scored] == [1, 3]
        for one, other in zip(record.scored, streamed[name].scored, strict=True):
            assert one["token_ids"] == other["token_ids"]
            assert one["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((), "generation.max_new_tokens = 8"),
        (("generation.max_new_tokens=0", "parallel.strategy=single"), "parallel.strategy = 'single'"),
        (("generation.max_new_tokens=0", "parallel.ranks_per_chain=all"), "parallel.ranks_per_chain = 'all'"),
        (("generation.max_new_tokens=0", "parallel.chunk_tokens=8"), "parallel.chunk_tokens = 8"),
        (("generation.max_new_tokens=0", "cache.kind=rolling"), "cache.kind = 'rolling'"),
        (("generation.max_new_tokens=0", "model.device=cuda"), "model.device = 'cuda'"),
        (("generation.max_new_tokens=0", "model.adapter=lora"), "model.adapter"),
        (("generation.max_new_tokens=0", "output.kv=sharded"), "output.kv = 'sharded'"),
        (("generation.max_new_tokens=1", "decode.mode=auto"), "decode.mode = 'auto'"),
        (("generation.max_new_tokens=1", "compress.method=streaming-llm", "compress.budget=64"), "[compress]"),
        (("generation.max_new_tokens=1", "documents.reuse=x"), "documents.reuse"),
        (("generation.max_new_tokens=1", "documents.format=openai-batch"), "documents.format = 'openai-batch'"),
    ],
)
def test_what_does_not_go_together_is_said_by_name(job: Path, settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_streaming(spec_of(job, *STREAMED, *settings), 2)
    assert str(caught.value).startswith(words) and "model.stream_weights = true" in str(caught.value)
    check_streaming(spec_of(job, *settings), 2)


def test_blocks_are_as_large_as_memory_lets_them() -> None:
    class Weights:
        layer_bytes = 10
        layers = 0

        def split(self, layers: int) -> None:
            self.layers = layers

    weights: Any = Weights()
    for free, layers in ((20, 1), (79, 1), (160, 2), (8000, 100)):
        split_blocks(weights, free)
        assert weights.layers == layers
    with pytest.raises(ConfigError, match="each are held at a time"):
        split_blocks(weights, 19)
