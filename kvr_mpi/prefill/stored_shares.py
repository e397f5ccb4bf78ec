"""Prompts that continue a stored document, on a chain that holds it sharded: each rank loads a shard, all run the rest.

Every rank keeps the keys and values of some tokens, in all layers (`SequenceKV.start`). All ranks run the model on the
same new tokens. In each layer a rank attends to its own tokens, and all parts are merged by log-sum-exp
(``kv.attention``). So no rank holds a whole prompt, documents can have any length, and all ranks get bit-identical
outputs. New tokens go to the last rank. In a layer with a window or chunks, the last rank has all visible tokens, and
the others add nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvr_mpi.errors import AgreementError, DataError
from kvr_mpi.kv.attention import PartialAttention, gather_parts, merge_gathered
from kvr_mpi.kv.row import Row
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LoadedModel
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import Failure, attempt, digest_of, explain_unreadable
from kvr_mpi.prefill.one_prompt import Prefill, wait_for_compute
from kvr_mpi.prefill.packed import run_row
from kvr_mpi.transport import Transport, share_json
from kvr_mpi.transport.collectives import all_gather

# Status of a rank after a row.
_DONE, _SHORT, _UNREADABLE = range(3)


def share_out_stored(known: int, tokens: int, size: int) -> Partition:
    """Divide a prompt's first `known` tokens evenly over ranks; the last rank gets the rest."""
    return Partition((*Partition.even(known, size).bounds[:-1], tokens))


class _Gathering:
    """Merges attention over the ranks of a chain, and counts the layers in which that was done."""

    def __init__(self, loaded: LoadedModel, chain: Transport, tokens: int) -> None:
        self._loaded, self._chain, self._tokens, self._done = loaded, chain, tokens, 0

    def __call__(self, part: PartialAttention) -> PartialAttention:
        gathered = gather_parts(part, self._chain)
        self._done += 1  # before the merge, whose memory may run out on this rank only
        return merge_gathered(gathered)

    def complete(self) -> None:
        """Take part in the remaining transfers of a row that failed on this rank, so that others can finish."""
        heads = self._loaded.model.config.get_text_config().num_attention_heads
        layers = [shape for shape in self._loaded.shape.layers if shape.elements]
        for shape in layers[self._done :]:
            sizes = (1, heads, self._tokens, shape.out_dim)
            gather_parts(PartialAttention.of_nothing(sizes, self._loaded.device), self._chain)


@torch.inference_mode()
def run_sharded(
    loaded: LoadedModel,
    sequences: Sequence[SequenceKV],
    tokens: Sequence[Sequence[int]],
    chain: Transport,
    *,
    only_last: bool = False,
) -> torch.Tensor:
    """Run new tokens of sharded prompts in one row; every rank of the chain calls this.

    A rank that fails completes its transfers (``failure``), so that all ranks raise the same error. Lengths do not
    change: the tokens can be run again, or with fewer prompts at a time.

    sequences : what this rank keeps of each prompt.
    tokens : new tokens of each prompt.
    only_last : compute logits only after each prompt's last token.

    Returns logits (tokens, vocab_size), the same on every rank. Raises on all ranks: `MemoryError` if
    any ran out of memory, with those ranks; `DataError` if any could not read its rows of a stored document;
    `AgreementError` if ranks have run different tokens.
    """
    ids = [token for each in tokens for token in each]
    merge = _Gathering(loaded, chain, len(ids))
    row = Row(sequences, list(map(len, tokens)), merge=merge)
    ends = torch.tensor([stop - 1 for _, stop in row.bounds], device=loaded.device)
    keep = ends if only_last else torch.arange(len(ids), device=loaded.device)
    found = attempt(lambda: run_row(loaded, row, ids, keep), loaded.tp_group, reads_stored=True)
    status, why = _DONE, ""
    if isinstance(found, Failure):
        status, why = _UNREADABLE if found.cause == "stored" else _SHORT, found.why
        if loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        merge.complete()
    digest = digest_of(ids, row.lengths)
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
    document: SequenceKV,
    chain: Transport,
    *,
    reserve_tokens: Sequence[int],
    last: int,
) -> list[Prefill]:
    """Prefill prompts that continue a stored document in one row; every rank of the chain calls this.

    If a rank runs out of memory, the prompts are split into halves.

    prompts : whole prompts, at least one, each of which begins with the document and continues after it.
    document : what this rank keeps of it; layers that are not loaded yet are read from the file.
    reserve_tokens : room for decoded tokens of each prompt.
    last : the rank that keeps the last tokens, and has the logits.

    Returns a prefill for each prompt; on all ranks with `error` instead, if any rank could not
    read its part of the document, or had no memory for a single prompt. `seconds` covers the whole row.
    """
    began, known = time.perf_counter(), document.length
    for ids in prompts:
        document.check(ids)
    fresh, logits, why = [ids[known:] for ids in prompts], None, document.failure
    sequences = list[SequenceKV]()
    if why is None:
        pairs = zip(fresh, reserve_tokens, strict=True)
        sequences = [document.fork(known + len(new) + reserve) for new, reserve in pairs]
        found = attempt(lambda: run_sharded(loaded, sequences, fresh, chain, only_last=True), reads_stored=True)
        wait_for_compute(loaded.device)
        if not isinstance(found, Failure):
            logits = found
            for sequence, new in zip(sequences, fresh, strict=True):
                sequence.length += len(new)
        else:
            for sequence in sequences:
                sequence.release()
        if isinstance(found, Failure) and found.cause == "stored":
            why = document.failure = explain_unreadable(found.why)
        elif isinstance(found, Failure) and len(prompts) > 1:
            half = len(prompts) // 2
            return [
                prefill
                for some in (slice(None, half), slice(half, None))
                for prefill in prefill_stored(
                    loaded, prompts[some], document, chain, reserve_tokens=reserve_tokens[some], last=last
                )
            ]
        elif isinstance(found, Failure):
            why = f"a question of {len(fresh[0])} tokens about a stored document: {found.why}"
    seconds = time.perf_counter() - began
    return [
        Prefill(
            share_out_stored(known, len(ids), chain.size),
            sequences[number] if why is None else None,
            logits[number].clone() if logits is not None and chain.rank == last else None,
            seconds,
            last=last,
            error=why,
            known_tokens=known,
            began_s=began,
        )
        for number, ids in enumerate(prompts)
    ]
