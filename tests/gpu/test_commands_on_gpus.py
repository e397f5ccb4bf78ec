"""Every command that runs ranks, on pretended GPUs: NCCL refuses host memory, and the control channel that of GPUs.

Two ranks are two GPUs, each on a host of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_nccl import Network
from jobs_together import TOGETHER, Bench, check, prepare_places
from made_jobs import answers, with_settings
from pretended_cuda import PretendedCuda

from kvr_mpi.errors import EXIT_OK
from kvr_mpi.runtime import prepare
from kvr_mpi.store.results import open_results

PLAIN = ("model.kernels=plain", "generation.max_new_tokens=2")
BY_HEADS = "decode.mode=head-parallel"


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
        pytest.param(6, ("parallel.ranks_per_chain=3", "output.trace=true"), marks=pytest.mark.long),
        (4, ("parallel.tensor_parallel=2",)),
        pytest.param(4, (BY_HEADS,), marks=pytest.mark.long),
        (4, (BY_HEADS, "compress.method=snapkv", "compress.budget=16", "compress.window=4")),
    ],
)
def test_ranks_are_connected_before_the_first_prompt(
    ranks: int,
    settings: tuple[str, ...],
    truths: dict[tuple[str, ...], Any],
    job: Path,
    launch: Any,
    network: Network,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pair that closes a chain's ring, and groups; ranks that decode together have no NCCL; all answer like one.

    Chains of a given length are connected before free memory is measured.
    """
    known: list[int] = []

    def room(*given: Any, measure: Any = prepare._room) -> Any:
        known.append(len(network.connections))
        return measure(*given)

    monkeypatch.setattr(prepare, "_room", room)
    for short in (0, 1):  # they take no chain
        (job.parent / "corpus" / f"doc-{short}.txt").unlink()
    launch(ranks, job, settings=settings)
    if "parallel.ranks_per_chain=3" in settings:
        assert max(known) == len(network.connections)
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
    launch(2, job, settings=(keeps, "documents.limit=2"))
    spread = ("parallel.ranks_per_chain=all",) if kv == "sharded" else ()
    for ranks, settings in ((2, spread), (1, ())):
        launch(ranks, out, "-q", "Who?", "--output", job.parent / str(ranks), settings=settings, command="ask")
    assert len(answers(out)) == 2 and answers(job.parent / "2") == answers(job.parent / "1") != {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words", "said", "kernel"),
    [
        ("verify", "--lengths 24", "checks passed on 2 ranks", "dense"),
        pytest.param("search", "--contexts 64 --output", "entries for 64", "dense", marks=pytest.mark.long),
        ("run", "", "5 documents", "paged"),
    ],
)
def test_ranks_use_flash_attention_in_bfloat16(
    command: str, words: str, said: str, kernel: str, job: Path, launch: Any, gpus: PretendedCuda, monkeypatch: Any
) -> None:
    monkeypatch.setattr("kvr_mpi.runtime.verify.NEW_TOKENS", 2)
    monkeypatch.setattr("kvr_mpi.decode.step_graph.STEPS_BEFORE", 99)  # what is pretended cannot be replayed
    monkeypatch.setattr("kvr_mpi.runtime.prepare.why_not_packed", lambda *given: None)  # its trial uses pages, too
    given = [*words.split(), *([job.parent / "tables"] if command == "search" else [])]
    assert said in launch(2, job, *given, settings=("model.dtype=bfloat16",), command=command)
    assert gpus.calls[kernel] > 0


# Every setting of a job: one CPU's answers, or the same refusal


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Any:
    return prepare_places(tmp_path_factory.mktemp("together"), tiny_model_dir)


# The jobs that show all pairs take minutes; two of them are run where tests may not take hours.
JOBS = [
    pytest.param(names, marks=pytest.mark.long if number > 1 else pytest.mark.slow)
    for number, names in enumerate([("planned",), *TOGETHER])
]


@pytest.mark.parametrize("names", JOBS, ids="+".join)
def test_settings_together_on_gpus(
    names: tuple[str, ...],
    prepared: Any,
    gpus: PretendedCuda,
    run_on_gpus_here: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Jobs of one rank run on a CPU, all others on GPUs."""
    gpus.watches = False
    folder, base, places, truths = prepared
    check(Bench(folder, run_on_gpus_here, monkeypatch, base, places, truths), names)


def test_documents_are_read_and_nothing_of_them_is_kept(launch: Any, job: Path) -> None:
    found = []
    for ranks in (1, 2):
        folder = job.parent / str(ranks)
        launch(ranks, job, settings=("output.embedding=mean", "generation.max_new_tokens=0", f"output.path={folder}"))
        found.append({record.id: record.embedding for record in open_results(folder)})
    assert len(found[0]) == 5
    assert all(found[1][name] == pytest.approx(values, abs=1e-4) for name, values in found[0].items())
