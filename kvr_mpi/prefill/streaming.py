"""Prefill a prompt of any length in memory that does not depend on it: a few tokens at a time, by a rolling cache.

One rank does it alone. For models all of whose layers have windows (or chunks) that fit this is exact; for others it is
StreamingLLM's approximation, if that is asked for by name (`kv.rolling`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvr_mpi.kv.rolling import Rolling, RollingCache
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.partition import cut_range


@torch.inference_mode()
def prefill_streaming(
    loaded: LoadedModel, ids: Sequence[int], rolling: Rolling | None = None
) -> tuple[torch.Tensor, RollingCache]:
    """Prefill on one rank.

    Every step has the same shapes, but for a last one that is shorter. The model has to be prepared for chains
    (`prepare_model`).

    Parameters
    ----------
    ids : sequence of int
        The whole prompt, at least one token.

    Returns
    -------
    (Tensor, RollingCache)
        Logits of the last token (vocab_size,), float32, and what goes on from there, token by token
        (`attention_hook.run_model`).

    Raises
    ------
    ModelError
        If the cache does not hold all that the model sees, and no approximation was asked for.
    """
    rolling = rolling or Rolling()
    loaded.shape.check_ids(ids)
    cache = RollingCache(loaded, rolling, len(ids))
    logits = None
    for first, last in cut_range(0, len(ids), rolling.step_tokens):
        logits = run_model(loaded.model, torch.tensor([ids[first:last]], device=loaded.device), cache)[0]
    assert logits is not None, "a prompt has a token"
    return logits, cache
