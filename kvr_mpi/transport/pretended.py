"""A chain that is not there: what a rank after a prefix does, without anyone who sends it.

Stands under whatever asks what one rank would take, in seconds (``planner.probe``) or bytes (``costs.memory``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvr_mpi.transport.local import LocalTransport

if TYPE_CHECKING:
    import torch


class _Arrived:
    """A transfer that has ended."""

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return


class PretendedChain(LocalTransport):
    """The second rank of a chain whose first has sent everything already; what it sent does not matter."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size, self.local_rank, self.local_size = 1, 2, 1, 2

    def irecv(self, tensor: torch.Tensor, source: int, tag: int) -> _Arrived:  # type: ignore[override]
        """Leave the buffer as it is, but not as it came: denormals would make the timing wrong."""
        tensor.zero_()
        return _Arrived()
