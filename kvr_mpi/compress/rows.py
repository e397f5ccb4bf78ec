"""Which rank has which (document, head) of a layer: a head with copies has each decode other documents of the batch.

A placement says how much of a head each of its pieces takes; documents are whole, so this comes as near to it as they
allow.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvr_mpi.compress.placement import LayerPlacement

Owners = npt.NDArray[np.int64]


def assign_rows(placed: LayerPlacement, counts: npt.NDArray[np.int64]) -> Owners:
    """Share the documents of each head out over its pieces: the largest first, where most of the load is missing.

    Parameters
    ----------
    placed : LayerPlacement
        Of one layer, by loads in proportion to the sums of `counts` over documents.
    counts : array
        Keys that each document's heads keep, (documents, kv_heads).

    Returns
    -------
    array
        The rank of each, (documents, kv_heads).
    """
    owners = np.zeros_like(counts)
    for head in range(counts.shape[1]):
        pieces = [piece for piece in placed.pieces if piece.head == head]
        whole = sum(piece.load for piece in pieces) or 1.0
        missing = [piece.load / whole * counts[:, head].sum() for piece in pieces]
        for document in np.argsort(-counts[:, head], kind="stable"):
            at = int(np.argmax(missing))
            owners[document, head] = pieces[at].rank
            missing[at] -= counts[document, head]
    return owners
