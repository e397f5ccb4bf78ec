"""kvr-mpi: long-document LLM batch work over MPI (KV-Runahead, Cho et al., ICML 2024).

What Python programs call is named here, and imported when it is first used: importing the package takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvr_mpi.errors import KvrError

if TYPE_CHECKING:
    from kvr_mpi.api.chain import Chain, ChainPrefill
    from kvr_mpi.api.jobs import RunOutcome, plan, run, simulate
    from kvr_mpi.store.results import DocumentKV, Results, open_results

__version__ = "0.1.0"

__all__ = [
    "Chain",
    "ChainPrefill",
    "DocumentKV",
    "KvrError",
    "Results",
    "RunOutcome",
    "__version__",
    "open_results",
    "plan",
    "run",
    "simulate",
]

# Where each name is, that is not here already.
_HOMES = {
    "Chain": "api.chain",
    "ChainPrefill": "api.chain",
    "DocumentKV": "store.results",
    "Results": "store.results",
    "RunOutcome": "api.jobs",
    "open_results": "store.results",
    "plan": "api.jobs",
    "run": "api.jobs",
    "simulate": "api.jobs",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Name what is for others, imported yet or not."""
    return sorted({*globals(), *__all__})
