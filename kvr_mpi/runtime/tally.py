"""Counts and times of a rank's work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields

from kvr_mpi.duration import duration_text
from kvr_mpi.errors import counted
from kvr_mpi.report.table import cut_off_line, repeated_line


@dataclass(slots=True)
class Tally:
    """Sums over a job, of one rank."""

    phase_s: float = 0.0  # in prefill phases
    busy_s: float = 0.0  # computing, during prefill phases
    decode_s: float = 0.0
    rank_s: float = 0.0  # rank-seconds of all ranks for this rank's answers (`Record.rank_s`)
    prefilled: int = 0  # prompts whose answers were begun here
    prompt_tokens: int = 0  # computed tokens of prompts that were decoded here
    new_tokens: int = 0
    steps: int = 0  # of the answers that were decoded here
    step_tokens: int = 0  # that these have generated
    answers: int = 0  # answered documents
    texts: list[int] = field(default_factory=list)  # tokens in the text of each answered document
    prompts: int = 0  # answered prompts: several for a document in parts
    partly_seen: int = 0  # answers whose coverage is below 1
    cut_off: int = 0  # answers that ended at max_new_tokens
    repeated: int = 0  # answers that were ended since they repeated themselves


def sum_up(tallies: Iterable[Tally]) -> Tally:
    """Sum up the counts of all ranks."""
    total = Tally()
    for tally in tallies:
        for one in fields(Tally):
            setattr(total, one.name, getattr(total, one.name) + getattr(tally, one.name))
    return total


def describe_throughput(
    total: Tally, documents: int, seconds: float, predicted_s: float | None, noun: str
) -> Iterator[str]:
    """Describe the throughput of all ranks; `noun` says what was answered."""
    if not documents or seconds <= 0:
        return
    planned = "" if predicted_s is None else f" (planned: {duration_text(predicted_s)})"
    busy = 100 * total.busy_s / total.phase_s if total.phase_s else 0
    failed = documents - total.answers
    also = f", {failed} failed" if failed else ""
    yield (
        f"{counted(total.answers, noun)} answered{also} in {duration_text(seconds)}{planned}: "
        f"{3600 * total.answers / seconds:.0f} answers/hour, "
        f"{total.prompt_tokens / seconds:.0f} prompt tokens/s, {total.new_tokens / seconds:.1f} new tokens/s; ranks "
        f"were computing for {busy:.0f} % of their prefill time"
    )
    if total.step_tokens > total.steps:
        yield (
            f"prompt lookup: {total.step_tokens / total.steps:.2f} tokens per decode step, "
            f"{100 - 100 * total.steps / total.step_tokens:.0f}% fewer steps, which take longer"
        )
    if total.partly_seen:
        yield (
            f"{total.partly_seen} of {total.answers} answers are based on only a part of their document (coverage "
            "in every export); prompt.min_coverage makes them errors"
        )
    if total.cut_off:
        yield cut_off_line(total.cut_off, total.answers)
    if total.repeated:
        yield repeated_line(total.repeated, total.answers)
