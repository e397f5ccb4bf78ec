"""Prompts that go a way of their own: through a rolling cache, on one rank or a chain, or over streamed weights."""

from __future__ import annotations

from collections.abc import Sequence

from kvr_mpi.prefill.in_pass import prefill_in_pass
from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.rolling_chain import prefill_rolling_chain
from kvr_mpi.prefill.streaming import prefill_rolling
from kvr_mpi.runtime.planned_prompt import PlannedPrompt
from kvr_mpi.setup.job_setup import JobSetup
from kvr_mpi.transport import Transport
from kvr_mpi.transport.forwarder import Forwarder


def goes_own_way(setup: JobSetup) -> bool:
    """Whether no prompt of a job goes as others do, whatever its length."""
    return setup.rolling is not None or setup.loaded.streamed is not None


def prefill_own_way(setup: JobSetup, row: Sequence[PlannedPrompt]) -> list[Prefill]:
    """Prefill prompts of a job whose prompts go so, those that go alone; in their order."""
    if (rolling := setup.rolling) is not None:
        return [prefill_rolling(setup.loaded, planned.prompt.ids, rolling) for planned in row]
    return prefill_in_pass(setup.loaded, [(planned.prompt.ids, planned.new_tokens) for planned in row])


def prefill_rolling_over(
    setup: JobSetup, planned: PlannedPrompt, chain: Transport, forwarder: Forwarder | None
) -> Prefill:
    """Prefill a prompt through rolling caches of all ranks of a chain."""
    assert planned.partition is not None and setup.rolling is not None, "it goes alone"
    return prefill_rolling_chain(
        setup.loaded,
        planned.prompt.ids,
        setup.rolling,
        planned.partition,
        chain,
        last=planned.decode_rank,
        forwarder=forwarder,
    )
