"""kvr-mpi: long-document LLM batch work over MPI (KV-Runahead, Cho et al., ICML 2024).

The names in `__all__` are imported when they are first used, so that importing the package takes no time.
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

# Modules of the names that are imported on first use.
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
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """List all public names, whether imported yet or not."""
    return sorted({*globals(), *__all__})
