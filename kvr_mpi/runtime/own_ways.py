"""Prompts that go through rolling caches of all ranks of a chain."""

from __future__ import annotations

from kvr_mpi.prefill.one_prompt import Prefill
from kvr_mpi.prefill.rolling_chain import prefill_rolling_chain
from kvr_mpi.runtime.planned_prompt import PlannedPrompt
from kvr_mpi.setup.job_setup import JobSetup
from kvr_mpi.transport import Transport
from kvr_mpi.transport.forwarder import Forwarder


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
