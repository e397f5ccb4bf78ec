"""Pretended GPUs, and a network of NCCL's kind between them."""

from __future__ import annotations

import pytest
from fake_nccl import Network, installed
from pretended_cuda import PretendedCuda, pretended


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    """Eight of them, in the place of torch.cuda."""
    return pretended(monkeypatch)


@pytest.fixture
def network(gpus: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> Network:
    """In the place of ``torch.distributed.ProcessGroupNCCL``."""
    return installed(monkeypatch, Network(gpus))
