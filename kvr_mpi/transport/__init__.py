"""Communication between ranks: one small protocol, and its implementations.

``base`` defines the protocol, ``mpi`` and ``nccl`` implement it for processes, ``local`` for threads of one process.
"""

from kvr_mpi.transport.base import (
    FailedTogetherError,
    Request,
    Transport,
    check_alike,
    gather_json,
    host_by_host,
    on_root,
    share_json,
    together,
)

__all__ = [
    "FailedTogetherError",
    "Request",
    "Transport",
    "check_alike",
    "gather_json",
    "host_by_host",
    "on_root",
    "share_json",
    "together",
]
