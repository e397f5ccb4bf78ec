"""Every command that runs ranks, on pretended GPUs: NCCL refuses host memory, and the control channel that of GPUs.

Settings of jobs are in `test_settings_on_gpus`; here are those that need more ranks, or several runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_jobs import answers, with_settings
from pretended_cuda import PretendedCuda

from kvr_mpi.errors import EXIT_OK

PLAIN = ("model.kernels=plain", "generation.max_new_tokens=2")
TOGETHER = "decode.mode=head-parallel"


@pytest.fixture
def launch(run_on_gpus_here: Any, gpus: PretendedCuda) -> Any:
    gpus.watches = False

    def run(ranks: int, *words: str | Path, settings: tuple[str, ...] = (), command: str = "run") -> str:
        done = run_on_gpus_here(ranks, [*words, *with_settings(*PLAIN, *settings)], command)
        assert done.returncode == EXIT_OK, done.stderr
        return str(done.stderr)

    return run


@pytest.fixture(scope="module")
def truths() -> dict[tuple[str, ...], Any]:
    """One rank's answers, by settings."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (6, ("parallel.ranks_per_chain=3", "output.trace=true")),
        (4, ("parallel.tensor_parallel=2",)),
        pytest.param(4, (TOGETHER,), marks=pytest.mark.long),
        (4, (TOGETHER, "compress.method=snapkv", "compress.budget=16", "compress.window=4")),
    ],
)
def test_ranks_are_connected_before_the_first_prompt(
    ranks: int, settings: tuple[str, ...], truths: dict[tuple[str, ...], Any], job: Path, launch: Any
) -> None:
    """The pair that closes a chain's ring, groups, and ranks that decode together; the answers are one rank's."""
    for short in (0, 1):  # they take no chain
        (job.parent / "corpus" / f"doc-{short}.txt").unlink()
    launch(ranks, job, settings=settings)
    alone = tuple(one for one in settings if one.startswith("compress"))
    if alone not in truths:
        launch(1, job, settings=(*alone, f"output.path={job.parent / 'alone'}"))
        truths[alone] = answers(job.parent / "alone")
    assert answers(job.parent / "out") == truths[alone] != {}


@pytest.mark.slow
@pytest.mark.parametrize("kv", [pytest.param("true", marks=pytest.mark.long), "sharded"])
def test_stored_documents_are_extended_and_asked(kv: str, job: Path, launch: Any) -> None:
    """Whole, or spread over the ranks."""
    out, keeps = job.parent / "out", f"output.kv={kv}"
    launch(2, job, settings=(keeps, "documents.limit=1"))
    launch(2, job, "--extend", settings=(keeps, "documents.limit=2"))
    spread = ("parallel.ranks_per_chain=all",) if kv == "sharded" else ()
    for ranks, settings in ((2, spread), (1, ())):
        launch(ranks, out, "-q", "Who?", "--output", job.parent / str(ranks), settings=settings, command="ask")
    assert len(answers(out)) == 2 and answers(job.parent / "2") == answers(job.parent / "1") != {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words", "told"),
    [
        ("verify", ["--lengths", "24"], "checks passed on 2 ranks"),
        ("search", ["--contexts", "64", "--output"], "entries for 64 tokens"),
    ],
)
def test_ranks_are_verified_and_measured(
    command: str, words: list[str], told: str, job: Path, launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvr_mpi.prefill.verify.NEW_TOKENS", 2)
    more = [job.parent / "tables"] if command == "search" else []
    assert told in launch(2, job, *words, *more, command=command)
