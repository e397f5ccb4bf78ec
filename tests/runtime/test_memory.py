"""What a plan says about memory, against what is measured, and what becomes of documents that do not fit."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from constants import ROOT, SMOLLM
from models import CONFIGS, deep, prompt, tiny

from kvr_mpi.compress.compression import open_compression
from kvr_mpi.compress.planned_drop import planned_drop
from kvr_mpi.compress.registry import METHODS
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.errors import DocumentError
from kvr_mpi.kv.chain import SliceLayer
from kvr_mpi.kv.relay import Relay
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.memory_budget import check_fits, footprint_of, ranks_that_fit
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.prefill.reading import Reading
from kvr_mpi.runtime import host_memory as memory
from kvr_mpi.runtime import prepare
from kvr_mpi.transport.local import run_local

# Models without windows, softcaps or sinks, whose attention is one kernel.
FLASH = ("llama-gqa", "llama-mha", "qwen2", "gpt2", "falcon-mqa", "falcon-mha", "falcon-gqa", "stablelm", "phi3", "opt")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore")  # a configuration made up for tests makes transformers warn
def test_activations_are_counted_and_grow_with_the_slice(name: str) -> None:
    loaded = tiny(name)
    footprint = footprint_of(loaded.model.config, loaded.dtype)
    small, large = footprint.activation_bytes(512), footprint.activation_bytes(4096)
    hidden = loaded.shape.hidden_size
    assert 512 * hidden * 4 < small < large < 20 * small
    if name in FLASH:  # no block of scores lies beside what grows with the slice
        assert large == pytest.approx(8 * small, rel=0.3)
    assert footprint.activation_bytes(768) == pytest.approx((small + footprint.activation_bytes(1024)) / 2, rel=0.01)


def test_the_last_rank_keeps_everything_and_what_does_not_fit_is_refused_with_the_ranks_that_would_do() -> None:
    loaded = tiny("llama-gqa")
    footprint, kv_bytes = footprint_of(loaded.model.config, loaded.dtype), loaded.shape.kv_bytes_per_token
    first, last = (footprint.slice_bytes(Relay(Partition((0, 600, 1000)), rank), reserve_tokens=24) for rank in (0, 1))
    layer_bytes = 1000 * kv_bytes // 3  # the last one's buffer, before it is released
    assert last == 1024 * kv_bytes + layer_bytes + footprint.activation_bytes(400)
    assert first <= 600 * kv_bytes + footprint.activation_bytes(600)
    partition = Partition.even(4096, 2)
    need = max(footprint.slice_bytes(Relay(partition, rank)) for rank in (0, 1))
    check_fits(footprint, partition, [need, need], 0)
    assert ranks_that_fit(lambda cut, rank: footprint.slice_bytes(Relay(cut, rank)), 4096, need) == 2
    alone = footprint.slice_bytes(Relay(Partition((0, 4096)), 0))
    with pytest.raises(DocumentError, match=r"4096 tokens does not fit: rank 0 of 1 needs .* 2 ranks would be enough"):
        check_fits(footprint, Partition((0, 4096)), [(alone + need) // 2], 0)
    with pytest.raises(DocumentError, match="more ranks would not help, since the last one keeps them all"):
        check_fits(footprint, partition, [4096 * kv_bytes] * 2, 0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("method", ["streaming-llm", "snapkv", "pyramidkv", "ada-snapkv"])
def test_what_compression_drops_is_planned_with(method: str, ranks: int) -> None:
    """What would not fit as a whole does, and what is held while it runs is not more than was planned."""
    loaded, tokens, text = deep(24), 400, (1, 380)
    footprint, partition = footprint_of(loaded.model.config, loaded.dtype), Partition.even(tokens, ranks)
    own = {"window": 12} if METHODS[method].observes else {}
    compression = open_compression(CompressSettings.model_validate({"method": method, "budget": 30, **own}), loaded)
    drop, last = compression.planned_drop(tokens, text), Relay(partition, ranks - 1)
    need = footprint.slice_bytes(last, reserve_tokens=8, drop=drop)
    others = max([need, *(footprint.slice_bytes(Relay(partition, rank)) for rank in range(ranks - 1))])
    check_fits(footprint, partition, [others] * (ranks - 1) + [need], 8, drop=drop)
    for refused in ({"drop": drop, "free": need - 1}, {"drop": None, "free": need}):
        with pytest.raises(DocumentError, match=f"does not fit: rank {ranks - 1} of {ranks}"):
            check_fits(footprint, partition, [others] * (ranks - 1) + [refused["free"]], 8, drop=refused["drop"])
    retain, held = compression.retain(tokens, text), list[int]()
    assert retain is not None and drop is not None

    def watched(layer: Any, choose: Any = retain.choose) -> Any:
        slabs = sum(each.slab.nbytes for each in layer.cache.layers if each.slab is not None)
        held.append(slabs + layer.cache.sequence.nbytes)
        return choose(layer)

    options: Any = {"retain": replace(retain, choose=watched), "reserve_tokens": 8}
    found = run_local(ranks, lambda rank: prefill_kvr(loaded, prompt(tokens), partition, rank, **options))
    cache, activations = found[-1].cache, footprint.activation_bytes(tokens - last.own[0])
    choosing = int(footprint.heap_share * drop.choosing_bytes)
    assert cache.nbytes < max(held) <= need - activations - choosing < tokens * loaded.shape.kv_bytes_per_token
    if ranks == 1:
        layer_bytes = (tokens + 8) * loaded.shape.kv_bytes_per_token // len(loaded.shape.layers)
        assert max(held) <= 1.15 * (cache.nbytes + layer_bytes), "what is kept, and one layer"


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_only_read_a_document_hold_a_few_layers_of_it(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, partition, attend = deep(16), Partition.even(400, ranks), SliceLayer.attend
    prepare_model(loaded.model, chain=True)
    footprint = replace(footprint_of(loaded.model.config, loaded.dtype), keeps_kv=False)
    relays = [Relay(partition, rank) for rank in range(ranks)]
    planned = [footprint.slice_bytes(each) - footprint.activation_bytes(400 // ranks) for each in relays]
    held: list[list[int]] = [[] for _ in relays]

    def watched(layer: SliceLayer, *given: Any) -> torch.Tensor:
        slabs = (each.slab.nbytes for each in layer.cache.layers if each.slab is not None)
        held[layer.cache.relay.position].append(sum(slabs))
        return attend(layer, *given)

    how: Any = {"reading": Reading("mean"), "keeps": False}
    with monkeypatch.context() as patch:
        patch.setattr(SliceLayer, "attend", watched)
        run_local(ranks, lambda rank: prefill_kvr(loaded, prompt(400), partition, rank, **how))
    for own, most, relay in zip(held, planned, relays, strict=True):
        assert 0 < max(own) <= most < relay.own[1] * loaded.shape.kv_bytes_per_token
    with pytest.raises(DocumentError, match="more ranks would not help$"):
        check_fits(footprint, partition, [1] * ranks, 0)


@pytest.mark.parametrize(("method", "is_safe"), [("snapkv", True), ("pyramidkv", False), ("ada-snapkv", False)])
def test_layers_that_may_keep_everything_are_planned_as_a_whole(method: str, is_safe: bool) -> None:
    """A rank's part of a model, some of whose heads may keep more than others; and where the text is not known."""
    settings, shape = CompressSettings(method=method, budget=30, window=12), tiny("llama-gqa").shape
    known = [planned_drop(settings, shape, 4, 90, text, ranks) for text, ranks in ((90, 1), (90, 2), (None, 1))]
    whole, part, unknown = (each.kv_bytes for each in known if each is not None)
    assert whole > 0 and part == (whole if is_safe else 0) and unknown == 0


@pytest.mark.long
def test_predicted_memory_is_what_is_measured(mpirun: Any, tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    options = ["--strategies", "kvr-e", "--contexts", "1024,2048", "--repeats", "2", "--json", rows_file]
    run = mpirun(2, [sys.executable, "-m", "benchmarks", "first-token", "--model", SMOLLM, *options], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    for row in json.loads(rows_file.read_text()):
        assert len(row["peak_bytes_by_rank"]) == 2
        assert row["predicted_bytes_by_rank"] == pytest.approx(row["peak_bytes_by_rank"], rel=0.1)


def test_limits_of_control_groups_are_found(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "root"
    job = root / "slurm" / "job_7"
    (job / "step_0").mkdir(parents=True)
    own.write_text("0::/slurm/job_7/step_0\n")
    for group, limit, used, cached in ((job, 1000, 400, 100), (job / "step_0", "max", 300, 0), (root, 5000, 1, 0)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 3\nfile {cached}\nfile_mapped 7\n")
    assert memory._group_room(own, root) == 700
    own.write_text("9:memory:/slurm/job_7\n3:cpu:/elsewhere\n")
    first = root / "memory" / "slurm" / "job_7"
    first.mkdir(parents=True)
    (first / "memory.limit_in_bytes").write_text("2000\n")
    (first / "memory.usage_in_bytes").write_text("1500\n")
    (first / "memory.stat").write_text("cache 200\nrss 1300\n")
    assert memory._group_room(own, root) == 700
    assert memory._group_room(tmp_path / "nothing", root) is None
    own.write_text("0::/gone\n")
    (root / "memory.max").write_text("max\n")
    assert memory._group_room(own, root) is None
    cpu = torch.device("cpu")
    assert 0 < memory.free_bytes(cpu, 4) < memory.free_bytes(cpu, 1), "ranks of a host share it"


@pytest.mark.parametrize(("name", "takes_chunks"), [("bloom-own-attention", False), ("llama-gqa", True)])
def test_prompts_of_any_length_need_no_memory_to_be_planned(name: str, takes_chunks: bool) -> None:
    """Of a model without a maximum length: their memory was counted with as many token ids."""
    loaded = tiny(name)
    prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
    footprint = prepare._footprint_of(loaded, 1 << 62, 8, 1 << 40)
    assert footprint.takes_chunks == takes_chunks
    assert not prepare._footprint_of(loaded, 1 << 12, 8, 1 << 40).takes_chunks
