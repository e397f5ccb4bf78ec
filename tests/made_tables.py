"""Tables to test with: made from a cost model, so that what they say is true of something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvr_mpi.costs.costmodel import best_split, chain_seconds
from kvr_mpi.costs.layer_costs import Costs
from kvr_mpi.model.load import load_outline
from kvr_mpi.tuning.identity import processor_name
from kvr_mpi.tuning.table import ModelIdentity, Provenance, Table, TableEntry, TableKey

# SmolLM2 on a core of a small machine.
COSTS = Costs(30, 1.3e-5, 6.9e-5, 2.8e-8, 2e-4, 1.5e-3, 1536, 6e9, 2e-5, head_s=0.01)
DATE = "2026-11-20T10:00:00Z"


def a_key(**changes: Any) -> TableKey:
    whole = {"dtype": "float32", "hardware": "here", "device": "a core", "ranks": 2, **changes}
    model = whole.pop("model", ModelIdentity(name="models/Tiny", fingerprint="f" * 64, architecture="LlamaForCausalLM"))
    return TableKey(model=model, **whole)


def an_entry(bounds: tuple[int, ...]) -> TableEntry:
    predicted_s = chain_seconds(COSTS, [b - a for a, b in zip(bounds, bounds[1:], strict=False)])
    return TableEntry(
        context_tokens=bounds[-1],
        bounds_tokens=bounds,
        ttft_s=1.1 * predicted_s,
        predicted_ttft_s=predicted_s,
        runs=3,
        repetitions=1,
        spread_ratio=None,
        noise_ratio=None,
        provenance=Provenance(
            date=DATE, hosts=["vm"], processor="a core", command="kvr search", versions={"torch": "2"}
        ),
    )


def a_table(contexts: tuple[int, ...] = (1024, 2048, 4096), ranks: int = 2) -> Table:
    """The best splits by `COSTS`, measured as a tenth slower than it says."""
    splits = [best_split(COSTS, tokens, ranks, quantum=16)[0] for tokens in contexts]
    return Table(key=a_key(ranks=ranks), rates=COSTS, entries=tuple(an_entry(split.bounds) for split in splits))


def fitting(table: Table, model: Path) -> Table:
    """The same for a model in a folder, on ranks of this machine that have a thread each (``OMP_NUM_THREADS=1``)."""
    fingerprint = load_outline(str(model), dtype="float32", offline=True, cache_dir=model).fingerprint
    identity = ModelIdentity(name="models/Tiny", fingerprint=fingerprint, architecture="LlamaForCausalLM")
    device = f"{processor_name()}, 1 thread"
    return table.model_copy(update={"key": a_key(model=identity, device=device, ranks=table.key.ranks)})
