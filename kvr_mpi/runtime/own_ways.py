"""Prompts that one rank prefills in a way of their own: through a rolling cache, or over weights that are streamed."""

from __future__ import annotations

from collections.abc import Sequence

from kvr_mpi.prefill.in_pass import prefill_in_pass
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.streaming import prefill_rolling
from kvr_mpi.runtime.planned_prompt import PlannedPrompt
from kvr_mpi.setup.job_setup import JobSetup


def has_own_way(setup: JobSetup) -> bool:
    """Whether all prompts of a job go alone, whatever their length."""
    return setup.rolling is not None or setup.loaded.streamed is not None


def prefill_own_way(setup: JobSetup, row: Sequence[PlannedPrompt]) -> list[Prefill]:
    """Prefill prompts of a job whose prompts go so; in their order."""
    if (rolling := setup.rolling) is not None:
        return [prefill_rolling(setup.loaded, planned.prompt.ids, rolling) for planned in row]
    return prefill_in_pass(setup.loaded, [(planned.prompt.ids, planned.new_tokens) for planned in row])
