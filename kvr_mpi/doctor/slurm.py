"""What SLURM's variables say, and whether it can be true."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from kvr_mpi.doctor.findings import Finding, ok, warn
from kvr_mpi.duration import duration_text

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


def check_slurm(environ: Mapping[str, str], size: int | None, hosts: int | None, now_s: float) -> list[Finding]:
    """Check the job's tasks, nodes, end and restarts; nothing outside SLURM."""
    if "SLURM_JOB_ID" not in environ:
        return [ok("slurm", "not in a SLURM job")]
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
    text = f"job {environ['SLURM_JOB_ID']}, {'?' if tasks is None else tasks} task(s)"
    return [ok("slurm", f"{text}, restarted {restarts} time(s)" if restarts else text), *findings]


def _check_size(environ: Mapping[str, str], size: int | None, hosts: int | None) -> list[Finding]:
    findings = []
    name = "SLURM_STEP_NUM_TASKS" if _number(environ, "SLURM_STEP_NUM_TASKS") == size else "SLURM_NTASKS"
    tasks = _number(environ, name)
    if None not in (tasks, size) and tasks != size:
        text = f"{name}={tasks}, but there are {size} rank(s)"
        findings.append(warn("slurm tasks", text, "omit -n for srun or mpirun, or request as many tasks as you start"))
    nodes = _number(environ, "SLURM_JOB_NUM_NODES")
    if None not in (nodes, hosts) and nodes != hosts:
        text = f"the job has {nodes} node(s), the ranks are on {hosts}"
        findings.append(warn("slurm nodes", text, "spread the ranks (`--ntasks-per-node`), or request fewer nodes"))
    return findings


def _check_end(value: str, now_s: float) -> list[Finding]:
    if not value:
        return [warn("slurm end", "SLURM_JOB_END_TIME is not set", END_TIME_REMEDY)]
    if not value.isdigit():
        return []  # said already
    when, left_s = f"{datetime.fromtimestamp(min(int(value), 2**37)):%Y-%m-%d %H:%M:%S}", int(value) - now_s
    if left_s <= 0:
        return [warn("slurm end", f"SLURM_JOB_END_TIME={value} ({when}) is in the past", END_TIME_REMEDY)]
    return [ok("slurm end", f"the job ends at {when}, in {duration_text(left_s)}")]


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else None
