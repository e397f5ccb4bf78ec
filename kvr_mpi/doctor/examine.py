"""The checks, one step after the other; a step that fails or breaks never prevents the next."""

from __future__ import annotations

from collections.abc import Mapping

from kvr_mpi.doctor.deadlines import SilentError, gather_tried
from kvr_mpi.doctor.facts import RANK_FACTS, RankFacts, look_at_rank, unknown_rank
from kvr_mpi.doctor.findings import Finding, fail, warn
from kvr_mpi.doctor.steps import STEPS, Request, Scene, still_here
from kvr_mpi.doctor.supervise import Tell
from kvr_mpi.transport import Transport


def examine(
    transport: Transport, request: Request, environ: Mapping[str, str], tell: Tell, launch: Finding | None = None
) -> bool:
    """Run all steps on this rank; rank 0 tells the findings.

    Parameters
    ----------
    launch : Finding or None
        Why the ranks could not be connected; this one is then examined alone, and does not touch MPI.

    Returns
    -------
    bool
        Whether all ranks still answer, so that MPI can be left in good order.
    """
    tell.step("ranks", 2 * request.patience_s)
    facts: list[RankFacts] = []
    try:
        facts = _gather_facts(transport, request, environ, launch is None)
        in_order = True
    except SilentError as error:
        in_order = False
        facts = [look_at_rank(transport.rank, transport.local_rank, environ, launch is None)]
        _tell_root(transport, tell, [_silent("ranks", error)])
    scene = Scene(transport, request, environ, facts, launch)
    for step in STEPS:
        if not in_order and transport.rank:
            break
        if not in_order and step.together:
            text = "not checked, since not all ranks answered"
            skipped = [] if step.work is still_here else [warn(step.check, text, "resolve the failure above first")]
            _tell_root(transport, tell, skipped)
            continue
        tell.step(step.check, step.timeout_s + 2 * request.patience_s + transport.size * request.effort.timeout_s)
        try:
            found = step.work(scene) if step.together or transport.rank == 0 else []
        except SilentError as error:
            in_order, found = False, [_silent(step.check, error)]
        except Exception as error:
            found = [_broken(step.check, error)]
        _tell_root(transport, tell, found)
    return in_order


def _gather_facts(
    transport: Transport, request: Request, environ: Mapping[str, str], with_mpi: bool
) -> list[RankFacts]:
    def look() -> object:
        return RANK_FACTS.dump_python(
            look_at_rank(transport.rank, transport.local_rank, environ, with_mpi), mode="json"
        )

    gathered = gather_tried(transport, look, request.patience_s)
    return [
        RANK_FACTS.validate_python(one["value"]) if "value" in one else unknown_rank(rank, one["error"])
        for rank, one in enumerate(gathered)
    ]


def _tell_root(transport: Transport, tell: Tell, findings: list[Finding]) -> None:
    if transport.rank == 0 and findings:
        tell.findings(findings)


def _silent(check: str, error: SilentError) -> Finding:
    remedy = "check the hosts of these ranks and the network between them; start on fewer hosts to find the faulty one"
    return fail(check, str(error), remedy)


def _broken(check: str, error: Exception) -> Finding:
    text = f"the check itself failed: {type(error).__name__}: {error}"
    return fail(check, text, "if this machine seems to be in order, report this as a bug in kvr-mpi")
