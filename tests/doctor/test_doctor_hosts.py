"""The output folder and the clocks, on one host and between several."""

from __future__ import annotations

from pathlib import Path

from made_facts import only, place

from kvr_mpi.doctor import folder, links
from kvr_mpi.doctor.findings import Finding
from kvr_mpi.transport.local import LocalTransport, run_local


def test_folder(tmp_path: Path) -> None:
    findings = folder.check_folder(tmp_path)
    assert [one.check for one in findings] == ["folder", "locking", "space"]
    assert findings[0].status == "ok"
    assert "does not exist yet" in folder.check_folder(tmp_path / "new" / "run")[0].found
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    found = only(folder.check_folder(Path("/proc")))
    assert found.status == "fail" and "/proc cannot be written" in found.found


def test_shared_folder(tmp_path: Path) -> None:
    facts = [place(rank, f"node{rank}") for rank in range(3)]

    def work(world: LocalTransport) -> list[Finding]:
        path = tmp_path / "elsewhere" if world.rank == 2 and apart else tmp_path / "runs"
        return folder.check_shared(world, path, facts)

    apart = False
    (tmp_path / "runs").mkdir()
    assert "the same on all 3 hosts" in only(run_local(3, work)[0]).found
    (tmp_path / "elsewhere").mkdir()
    apart = True
    found = only(run_local(3, work)[0])
    assert found.status == "fail" and "rank 2 on node2" in found.found and "rank 1" not in found.found
    assert not list((tmp_path / "runs").iterdir())


def test_clocks() -> None:
    facts = [place(0), place(1), place(2, "node2")]
    assert links.first_on_each_host(facts) == [2]
    assert only(links.check_clocks({}, facts[:2])).status == "ok"
    assert only(links.check_clocks({2: 0.2}, facts)).status == "ok"
    found = only(links.check_clocks({2: -3.5}, facts))
    assert found.status == "warn" and "node2 is 3.500 s behind node1" in found.found
    skews_s = run_local(3, lambda world: links.measure_clocks(world, [1, 2]))[0]
    assert set(skews_s) == {1, 2} and all(abs(skew_s) < 30 for skew_s in skews_s.values())
