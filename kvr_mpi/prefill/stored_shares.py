"""Prompts that continue a stored document, on a chain that holds it sharded: each rank loads a shard, all run the rest.

No rank ever holds more than its share (``kv.shares``), so that prompts can continue a document of any length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvr_mpi.errors import AgreementError, DataError
from kvr_mpi.kv.shares import Share, SharesCache
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import Failure, attempt, digest_of, explain_unreadable
from kvr_mpi.prefill.one_prompt import Prefill, wait_for_compute
from kvr_mpi.transport import Transport, share_json
from kvr_mpi.transport.collectives import all_gather

# Status of a rank after a row.
_DONE, _SHORT, _UNREADABLE = range(3)


def share_out_stored(known: int, tokens: int, size: int) -> Partition:
    """Divide a prompt's first `known` tokens evenly over ranks; the last rank gets the rest."""
    return Partition((*Partition.even(known, size).bounds[:-1], tokens))


@torch.inference_mode()
def run_shares(
    loaded: LoadedModel,
    shares: Sequence[Share],
    tokens: Sequence[Sequence[int]],
    chain: Transport,
    *,
    only_last: bool = False,
) -> torch.Tensor:
    """Run new tokens of sharded prompts in one row; every rank of the chain calls this.

    A rank that fails completes its transfers (``failure``), so that all ranks raise the same error. `Share.length` does
    not change: the tokens can be run again, or with fewer prompts at a time.

    shares : this rank's share of each prompt.
    tokens : new tokens of each prompt.
    only_last : compute logits only after each prompt's last token.

    Returns logits (tokens, vocab_size), the same on every rank. Raises on all ranks: `MemoryError` if
    any ran out of memory, with those ranks; `DataError` if any could not read its rows of a stored document;
    `AgreementError` if ranks have run different tokens.
    """
    cache = SharesCache(loaded, shares, [len(each) for each in tokens], chain)
    row = torch.tensor([[token for each in tokens for token in each]], device=loaded.device)
    ends = torch.tensor([stop - 1 for _, stop in cache.bounds], device=loaded.device)
    keep = ends if only_last else torch.arange(row.shape[1], device=loaded.device)
    found = attempt(
        lambda: run_model(loaded.model, row, cache, positions=cache.positions, keep=keep),
        loaded.tp_group,
        reads_stored=True,
    )
    status, why = _DONE, ""
    if isinstance(found, Failure):
        status, why = _UNREADABLE if found.cause == "stored" else _SHORT, found.why
        if loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        cache.play_on()
    digest = digest_of(row[0].tolist(), [share.length for share in shares])
    sent = torch.tensor([status, digest], dtype=torch.int64, device=loaded.device)
    words = [each.tolist() for each in all_gather(chain, sent)]
    if len({digest for _, digest in words}) > 1:
        raise AgreementError(
            f"ranks of a chain have run different tokens of prompts that are spread over them (digests "
            f"{[digest for _, digest in words]}): the job ends before a wrong answer is stored; please report this"
        )
    statuses = [status for status, _ in words]
    if _UNREADABLE in statuses:
        raise DataError(share_json(chain, why, statuses.index(_UNREADABLE)))
    if short := [str(rank) for rank, status in enumerate(statuses) if status == _SHORT]:
        raise MemoryError(f"rank {', '.join(short)} of its chain ran out of memory{f' ({why})' if why else ''}")
    assert not isinstance(found, Failure), "it succeeded"
    return found


@torch.inference_mode()
def prefill_stored(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    document: Share,
    chain: Transport,
    *,
    reserve_tokens: Sequence[int],
    last: int,
) -> list[Prefill]:
    """Prefill prompts that continue a stored document in one row; every rank of the chain calls this.

    If a rank runs out of memory, the prompts are split into halves.

    prompts : whole prompts, at least one, each of which begins with the document and continues after it.
    document : this rank's share; layers that are not loaded yet are read from the file.
    reserve_tokens : room for decoded tokens of each prompt, in the last share.
    last : the rank that has the last share, and computes the logits.

    Returns a prefill for each prompt, with this rank's share; on all ranks with `error` instead, if any rank could not
    read its part of the document, or had no memory for a single prompt. `seconds` covers the whole row.
    """
    began, known = time.perf_counter(), document.length
    assert document.prefix is not None, "it is stored"
    for ids in prompts:
        document.prefix.check(ids)
    fresh, logits, why = [ids[known:] for ids in prompts], None, document.failure
    pairs = zip(fresh, reserve_tokens, strict=True)
    shares = [Share.after(loaded, document, len(new) + reserve) for new, reserve in pairs]
    if why is None:
        found = attempt(lambda: run_shares(loaded, shares, fresh, chain, only_last=True), reads_stored=True)
        wait_for_compute(loaded.device)
        if not isinstance(found, Failure):
            logits = found
        elif found.cause == "stored":
            why = explain_unreadable(found.why)
            document.end_loading(why)
        elif len(prompts) > 1:
            shares.clear()  # frees their reserved rows
            half = len(prompts) // 2
            return [
                prefill
                for some in (slice(None, half), slice(half, None))
                for prefill in prefill_stored(
                    loaded, prompts[some], document, chain, reserve_tokens=reserve_tokens[some], last=last
                )
            ]
        else:
            why = f"a question of {len(fresh[0])} tokens about a stored document: {found.why}"
    if why is None:
        document.end_loading()
        for share, new in zip(shares, fresh, strict=True):
            share.length += len(new)
    seconds = time.perf_counter() - began
    return [
        Prefill(
            share_out_stored(known, len(ids), chain.size),
            None,
            logits[number].clone() if logits is not None and chain.rank == last else None,
            seconds,
            last=last,
            error=why,
            known_tokens=known,
            share=share if why is None else None,
            began_s=began,
        )
        for number, (ids, share) in enumerate(zip(prompts, shares, strict=True))
    ]
