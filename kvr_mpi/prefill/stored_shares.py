"""Prompts whose beginning is stored, over a chain that holds it together: each rank loads a share, all run the rest.

No rank ever holds more than its share (``kv.shares``), so that a document larger than a rank's memory can be asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvr_mpi.errors import AgreementError, DataError
from kvr_mpi.kv.document_share import DocumentShare
from kvr_mpi.kv.shares import Share, SharesCache
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.model.tp_group import guarded
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import UNREADABLE, digest_of, is_out_of_memory
from kvr_mpi.prefill.one_prompt import Prefill, wait_for_compute
from kvr_mpi.transport import Transport, share_json
from kvr_mpi.transport.collectives import all_gather


def share_out_stored(known: int, tokens: int, size: int) -> Partition:
    """Divide a prompt's first `known` tokens evenly over ranks; those after them go to the last."""
    return Partition((*Partition.even(known, size).bounds[:-1], tokens))


def run_shares(loaded: LoadedModel, row: torch.Tensor, cache: SharesCache) -> tuple[torch.Tensor | None, str | None]:
    """Run new tokens (1, tokens) of prompts that are spread over a chain; every rank of it calls this.

    A rank whose memory runs out plays on (``failure``), so that it is known to all of them alike. Nothing has been
    counted in then: the row may be run again, or in pieces.

    Returns
    -------
    (torch.Tensor, None) or (None, str)
        Logits (tokens, vocab_size), the same on every rank; or which ranks had no memory, and why if this one had none.

    Raises
    ------
    AgreementError
        If ranks have run different tokens.
    """
    logits, why = _run(loaded, row, cache, torch.arange(row.shape[1], device=loaded.device))
    digest = digest_of(row[0].tolist(), [share.length for share in cache.shares], "step")
    words = _gather_words(cache.chain, loaded.device, [logits is None, digest])
    _check_digests([digest for _, digest in words], "different tokens of prompts that are spread over them")
    failed = [rank for rank, (is_short, _) in enumerate(words) if is_short]
    return (None, _describe_shortage(failed, why)) if failed else (logits, None)


def _check_digests(digests: Sequence[int], what: str) -> None:
    if len({*digests}) > 1:
        raise AgreementError(
            f"ranks of a chain have run {what} (digests {[*digests]}): the job ends before a wrong answer is stored; "
            f"please report this"
        )


def _run(
    loaded: LoadedModel, row: torch.Tensor, cache: SharesCache, keep: torch.Tensor | None
) -> tuple[torch.Tensor | None, str]:
    """Run new tokens; return their logits, or None and what this rank had no memory for."""
    logits, why = None, ""
    try:
        with guarded(loaded.tp_group):
            logits = run_model(loaded.model, row, cache, positions=cache.positions, keep=keep)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = str(error).splitlines()[0]
    # Out of the except block: the error held on to what had been made.
    if logits is None:
        if loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        cache.play_on()
    return logits, why


def _gather_words(chain: Transport, device: torch.device, words: Sequence[int]) -> list[list[int]]:
    """Give every rank each rank's integers, in rank order; one message from each rank to each."""
    return [found.tolist() for found in all_gather(chain, torch.tensor(words, dtype=torch.int64, device=device))]


def _describe_shortage(ranks: Sequence[int], why: str) -> str:
    return f"rank {', '.join(map(str, ranks))} of its chain ran out of memory{f' ({why})' if why else ''}"


@dataclass(frozen=True, slots=True)
class _Row:
    """What became of prompts in a row.

    shares : this rank's of each.
    logits : of each (prompts, vocab_size), the same on every rank.
    error : why there are none; the same on every rank, but for what only this one knows.
    is_short : memory ran out, and may do for some of them.
    """

    shares: Sequence[Share] = ()
    logits: torch.Tensor | None = None
    error: str | None = None
    is_short: bool = False


@torch.inference_mode()
def prefill_stored(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    document: DocumentShare,
    chain: Transport,
    *,
    reserve_tokens: Sequence[int],
    last: int,
) -> list[Prefill]:
    """Run what follows a stored document in some prompts, in one row; every rank of the chain calls this.

    If a rank has no memory for all of them they are run in halves.

    Parameters
    ----------
    prompts : sequence of sequences of int
        Whole prompts, at least one, each of which begins with the document and goes on.
    document : DocumentShare
        This rank's; layers that have not been read are.
    reserve_tokens : sequence of int
        Room for tokens to be decoded after each, in the last share.
    last : int
        The rank that has the last share, and ends with the logits.

    Returns
    -------
    list of Prefill
        With this rank's share of each; on all ranks with `error` instead, if some rank could not read its own, or had
        no memory for a prompt by itself. Every one took as long as all of its row.
    """
    began = time.perf_counter()
    for ids in prompts:
        document.prefix.check(ids)
    row = _run_row(loaded, prompts, document, chain, reserve_tokens)
    if row.is_short and len(prompts) > 1:
        half = len(prompts) // 2
        return [
            prefill
            for some in (slice(None, half), slice(half, None))
            for prefill in prefill_stored(
                loaded, prompts[some], document, chain, reserve_tokens=reserve_tokens[some], last=last
            )
        ]
    seconds, logits = time.perf_counter() - began, row.logits if chain.rank == last else None
    return [
        Prefill(
            share_out_stored(document.tokens, len(ids), chain.size),
            None,
            None if logits is None else logits[number].clone(),
            seconds,
            last=last,
            error=row.error,
            known_tokens=document.tokens,
            share=row.shares[number] if row.shares else None,
            began_s=began,
        )
        for number, ids in enumerate(prompts)
    ]


def _run_row(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    document: DocumentShare,
    chain: Transport,
    reserve_tokens: Sequence[int],
) -> _Row:
    """Run what follows the document in all prompts at once; what failed is gone when this returns."""
    known = document.tokens
    fresh = [len(ids) - known for ids in prompts]
    pairs = zip(fresh, reserve_tokens, strict=True)
    shares = [Share.after(loaded, document, tokens + reserve) for tokens, reserve in pairs]
    cache = SharesCache(loaded, shares, fresh, chain)
    row = torch.tensor([[token for ids in prompts for token in ids[known:]]], device=loaded.device)
    ends = torch.tensor([stop - 1 for _, stop in cache.bounds], device=loaded.device)
    logits, why = _run(loaded, row, cache, ends)
    wait_for_compute(loaded.device)
    own_failure = _failure_of(document, loaded)
    digest = digest_of(row[0].tolist(), [known], "stored")
    words = _gather_words(chain, loaded.device, [logits is None, own_failure is not None, digest])
    _check_digests([digest for *_, digest in words], "different questions about a stored document")
    if (reader := next((rank for rank, (_, failed, _) in enumerate(words) if failed), None)) is not None:
        failure: str = share_json(chain, own_failure, reader)
        document.give_up(failure)
        return _Row(error=f"{UNREADABLE}: {failure}")
    if failed := [rank for rank, (is_short, _, _) in enumerate(words) if is_short]:
        short = _describe_shortage(failed, why)
        return _Row(error=f"a question of {fresh[0]} tokens about a stored document: {short}", is_short=True)
    cache.lengthen()
    document.end_loading()
    return _Row(shares, logits)


def _failure_of(document: DocumentShare, loaded: LoadedModel) -> str | None:
    """Say why what is stored could not be read, on this rank or another one of its group; None: it was."""
    try:
        with guarded(loaded.tp_group):
            if document.failure is not None:
                raise DataError(document.failure)
    except DataError as error:
        return str(error)
    return None
