"""What a run costs: energy from a tree like powercap's, shared among documents, kept when it is merged or resumed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvr_mpi.plain import read_plain
from kvr_mpi.report.page import page_of
from kvr_mpi.runtime import meters
from kvr_mpi.runtime.meters import Meters
from kvr_mpi.runtime.tally import Tally
from kvr_mpi.store.cost import Cost, total_cost
from kvr_mpi.store.results import open_results

CPU = torch.device("cpu")
RANGE_UJ = 10_000_000


def add_zone(powercap: Path, zone: str, name: str, microjoules: int = 0) -> Path:
    folder = powercap / f"intel-rapl:{zone}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def spent(meter: Meters) -> float | None:
    return meter.cost(Tally()).joules


def test_packages_and_memory_count_once_and_ranks_of_a_host_share_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    powercap, now_s = tmp_path / "powercap", [100.0]
    monkeypatch.setattr(meters, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    files = [add_zone(powercap, zone, name) for zone, name in (("0", "package-0"), ("1", "package-1"), ("0:1", "dram"))]
    others = [add_zone(powercap, zone, name) for zone, name in (("2", "psys"), ("0:0", "core"))]
    first, second = (Meters(CPU, 2, rank, powercap) for rank in range(2))
    now_s[0] += 10
    for file in (*files, *others):
        file.write_text("4000000")
    assert spent(first) == spent(second) == pytest.approx(6.0)
    found = total_cost(meter.cost(Tally(rank_s=3.0), 4) for meter in (first, second))
    assert found.joules == pytest.approx(12.0) and found.meters == "RAPL: dram, package"
    assert found.joules_per_rank_s == pytest.approx(2.0)
    assert (found.node_s, found.core_s) == (10, 80), "the first rank of a host counts the node"


def test_a_counter_that_begins_anew_goes_on(tmp_path: Path) -> None:
    file = add_zone(tmp_path, "0", "package-0", RANGE_UJ - 1_000_000)
    meter = Meters(CPU, powercap=tmp_path)
    for now, seen in ((2_000_000, 3.0), (9_000_000, 10.0), (1_000_000, 12.0)):
        file.write_text(str(now))
        assert spent(meter) == pytest.approx(seen)


def test_what_cannot_be_read_has_no_figure_but_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    powercap = tmp_path / "powercap"
    assert "has no RAPL zones" in Meters(CPU, powercap=powercap).cost(Tally()).meters
    file = add_zone(powercap, "0", "package-0")
    meter = Meters(CPU, powercap=powercap)
    file.unlink()
    assert spent(meter) is None and "a counter failed" in meter.cost(Tally()).meters
    file.write_text("much")
    assert "much" in Meters(CPU, powercap=powercap).cost(Tally()).meters

    def refuse(self: Path, *given: Any, **options: Any) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(self, *given, **options)

    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", refuse)
    closed = Meters(CPU, powercap=powercap).cost(Tally())
    assert closed.joules is None and closed.meters.endswith("energy_uj is for root only")
    known = Cost("a", joules=5.0, rank_s=1.0, meters="RAPL: package")
    assert total_cost([known, closed]).joules is None, "half of the energy is no figure"
    assert total_cost([known, closed]).describe(1).endswith("for root only")


def test_a_line_that_is_no_cost_is_damaged() -> None:
    for change in (
        *({"joules": -1.0}, {"rank_s": float("inf")}, {"core_s": "1"}, {"node_s": True}, {"key": 3}, {"meters": 1}),
        *({"expected_s": [1.0]}, {"expected_s": [1.0, 2.0, "3"]}, {"expected_s": 3}, {"took_s": None}),
    ):
        with pytest.raises(ValueError, match=next(iter(change))):
            read_plain(Cost, {**Cost("k", joules=2.0).as_line(), **change})


def test_documents_share_what_a_run_has_spent(tmp_path: Path, run_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add_zone(tmp_path / "powercap", "0", "package-0")
    readings = iter(range(1, 1000))
    monkeypatch.setattr(meters, "POWERCAP", tmp_path / "powercap")
    monkeypatch.setattr(meters.Zone, "joules", lambda zone: 100.0 * next(readings))
    first = run_job(2, "documents.limit=3", to="out")
    assert "(RAPL: package)" in first.log and "core hours" in first.log
    before = open_results(first.folder)
    run_job(1, to="out", words=["--extend"])
    results = open_results(first.folder)
    assert len(results) == 5 and results.cost.joules and before.cost.joules
    assert results.cost.joules > before.cost.joules and results.cost.core_s > before.cost.core_s
    assert len(results.costs) == 3, "two ranks, and then one"
    assert f"cost: {results.cost.describe(5)}" in page_of(tmp_path / "out")[0].decode()
    records = list(results)
    assert sum(record.joules for record in records) == pytest.approx(results.cost.joules)
    assert sum(record.rank_s for record in records) == pytest.approx(results.cost.rank_s)
    assert min(record.rank_s for record in records) > 0
