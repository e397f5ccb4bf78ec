"""Prefill several prompts in one row, and decode one token each of many answers (``kv.row``).

A chain can hold a stored document sharded, so that no rank holds a whole prompt, and documents can have any length:
every rank keeps the keys and values of some tokens, in all layers (`SequenceKV.start`), and new tokens go to the last
rank. All ranks run the model on the same new tokens. In each layer a rank attends to its own tokens, and all parts are
merged by log-sum-exp (`Gathering`), so all ranks get bit-identical outputs. In a layer with a window or chunks, the
last rank has all visible tokens, and the others add nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import Any, Literal

import torch

from kvr_mpi.compress.compression import size_of
from kvr_mpi.errors import AgreementError, DataError
from kvr_mpi.kv.attention import PartialAttention, gather_parts, merge_gathered
from kvr_mpi.kv.chain import Retain
from kvr_mpi.kv.pool import Pool
from kvr_mpi.kv.row import Row
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import Failure, attempt, digest_of, explain_unreadable
from kvr_mpi.prefill.one_prompt import Prefill, pool_for, prefill_whole, wait_for_compute
from kvr_mpi.prefill.reading import Reading
from kvr_mpi.transport import Transport, share_json
from kvr_mpi.transport.collectives import all_gather

# Status of a rank after a sharded row.
_DONE, _SHORT, _UNREADABLE = range(3)
# Tokens of a packed forward pass, by device type: a GPU needs more rows for the full speed of its products.
PACK_TOKENS = {"cpu": 2048, "cuda": 8192}


def prefill_packed(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    *,
    reserve_tokens: int | Sequence[int] = 0,
    prefix: SequenceKV | None = None,
    retain: Retain | None = None,
    pool: Pool | None = None,
    readings: Sequence[Reading] = (),
    gathering: Gathering | None = None,
    last: int = 0,
) -> list[Prefill]:
    """Prefill several prompts in one forward pass, each exactly as alone (`prefill_kvr` on one rank).

    If memory runs out, the prompts are split into halves; one that does not fit alone gets a `Prefill.error`.

    prompts : at least one, none of them empty.
    reserve_tokens : room for decoded tokens, the same for all prompts or for each.
    prefix : prefix of all prompts, if it has been computed; the prompts still contain it.
    retain : for a single prompt: what its heads keep.
    pool : for keys and values; None: `pool_for`.
    readings : what is read of each prompt instead of its logits, of all of them the same; empty: nothing.
    gathering : merges attention over the ranks that hold the prefix sharded, and call this together.
    last : of these, the rank that keeps the last tokens, and has the logits.

    Returns a prefill for each prompt, with its own cache; `seconds` covers the whole forward pass. Raises `DataError`
    if the prefix is stored, and cannot be read; with a `gathering`, the prefills have this error on all ranks.
    """
    assert retain is None or len(prompts) == 1, "prompts that are compressed run one by one"
    reserves = [reserve_tokens] * len(prompts) if isinstance(reserve_tokens, int) else reserve_tokens
    pool, is_compressed = pool or pool_for(loaded, prefix), prefix is not None and bool(prefix.compression)
    if gathering is None and ((len(prompts) == 1 and not is_compressed) or why_never_packed(loaded)):
        return [
            prefill_whole(
                loaded,
                ids,
                reserve_tokens=reserve,
                prefix=prefix,
                spares_chain=True,
                retain=retain,
                pool=pool,
                reading=reading,
            )
            for ids, reserve, reading in zip(prompts, reserves, readings or repeat(None, len(prompts)), strict=True)
        ]
    began, failure = time.perf_counter(), None
    if prefix is None or prefix.failure is None:
        tp_group = loaded.tp_group if gathering is None else None
        row = partial(_prefill_row, loaded, prompts, reserves, prefix, pool, readings, gathering, last)
        found = attempt(row, tp_group, reads_stored=gathering is not None)
        if not isinstance(found, Failure):
            return found
        failure = found
        if loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(prompts) > 1 and failure.cause == "memory":
            half = len(prompts) // 2
            rest: Any = {"prefix": prefix, "pool": pool, "gathering": gathering, "last": last}
            return [
                prefill
                for some in (slice(None, half), slice(half, None))
                for prefill in prefill_packed(
                    loaded, prompts[some], reserve_tokens=reserves[some], readings=readings[some], **rest
                )
            ]
    assert prefix is not None, "others run as a slice"
    why = prefix.failure or ""
    if failure is not None and failure.cause == "stored":
        why = prefix.failure = explain_unreadable(failure.why)
    elif failure is not None:
        new = len(prompts[0]) - prefix.length
        why = f"not enough memory for its {prefix.length} stored tokens and {new} more: {failure.why}"
    facts: dict[str, Any] = {"error": why, "last": last, "known_tokens": prefix.length, "began_s": began}
    seconds = time.perf_counter() - began
    return [Prefill(_partition_of(ids, prefix, gathering), None, None, seconds, **facts) for ids in prompts]


@torch.inference_mode()
def _prefill_row(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    reserves: Sequence[int],
    prefix: SequenceKV | None,
    pool: Pool,
    readings: Sequence[Reading],
    gathering: Gathering | None,
    last: int,
) -> list[Prefill]:
    began, start, sequences = time.perf_counter(), 0 if prefix is None else prefix.length, list[SequenceKV]()
    try:
        for ids, reserve in zip(prompts, reserves, strict=True):
            if prefix is None:
                sequences.append(SequenceKV(loaded, pool, len(ids) + reserve))
            else:
                prefix.check(ids)
                sequences.append(prefix.fork(len(ids) + reserve, pool))
        reads_all = any(reading.reads_all for reading in readings)
        new = [len(ids) - start for ids in prompts]
        row = Row(sequences, new, reads="all" if reads_all else "last", merge=gathering)
        tokens = [token for ids in prompts for token in ids[start:]]
        outputs: list[dict[str, Any]]
        if readings:
            states = run_row(loaded, row, tokens, reads="states")
            each_states = (states[first:stop] for first, stop in row.bounds)
            outputs = [
                {"logits": None, "read": reading.join([reading.read(loaded, ids, start, own)], len(ids))}
                for ids, reading, own in zip(prompts, readings, each_states, strict=True)
            ]
        else:
            ends = torch.tensor([stop - 1 for _, stop in row.bounds], device=loaded.device)
            if gathering is None:
                outputs = [{"logits": each.clone()} for each in run_row(loaded, row, tokens, ends)]
            else:
                logits = gathering.run(row, tokens, ends)
                outputs = [{"logits": each if gathering.chain.rank == last else None} for each in logits]
        row.advance()
        wait_for_compute(loaded.device)
    except BaseException:
        for sequence in sequences:
            sequence.release()
        raise
    seconds = time.perf_counter() - began
    prefills = [
        Prefill(
            _partition_of(ids, prefix, gathering),
            sequence,
            seconds=seconds,
            last=last,
            **output,
            known_tokens=start,
            began_s=began,
            row_share=(len(ids) - start) / row.bounds[-1][1],
        )
        for ids, sequence, output in zip(prompts, sequences, outputs, strict=True)
    ]
    if prefix is not None and prefix.compression and gathering is None:
        for prefill in prefills:
            prefill.retained = size_of(loaded, prefill.cache, prefix.compression)
    return prefills


def _partition_of(ids: Sequence[int], prefix: SequenceKV | None, gathering: Gathering | None) -> Partition:
    if prefix is None or gathering is None:
        return Partition((0, len(ids)))
    return share_out_stored(prefix.length, len(ids), gathering.chain.size)


def share_out_stored(known: int, tokens: int, size: int) -> Partition:
    """Divide a prompt's first `known` tokens evenly over ranks; the last rank gets the rest."""
    return Partition((*Partition.even(known, size).bounds[:-1], tokens))


def run_row(
    loaded: LoadedModel,
    row: Row,
    tokens: Sequence[int],
    keep: torch.Tensor | None = None,
    reads: Literal["logits", "states"] = "logits",
) -> torch.Tensor:
    """Run the model on the new tokens of a row; lengths do not change until `Row.advance`.

    keep : indices of the tokens whose logits are returned (rows,); None: of all tokens.

    Returns logits (rows, vocab_size), float32, or what it `reads`.
    """
    inputs = torch.tensor([list(tokens), row.begin()], device=loaded.device)
    return run_inputs(loaded, row, inputs, keep, reads)


def run_inputs(
    loaded: LoadedModel,
    row: Row,
    inputs: torch.Tensor,
    keep: torch.Tensor | None = None,
    reads: Literal["logits", "states"] = "logits",
) -> torch.Tensor:
    """Run a row after `Row.begin`, also while the step is recorded.

    inputs : the tokens, and the tokens of their sequence before each (2, tokens), int64 on the device.
    """
    row.begin_on_device(inputs[1])
    keep = torch.arange(inputs.shape[1], device=inputs.device) if keep is None else keep
    # The model counts the positions of a single sequence.
    positions = inputs[1:] + loaded.shape.first_position if row.needs_positions else None
    return run_model(loaded.model, inputs[:1], row, positions=positions, keep=keep, reads=reads)


@torch.inference_mode()
def decode_packed(loaded: LoadedModel, row: Row, tokens: Sequence[int]) -> torch.Tensor:
    """Run one more token of each sequence, or as many as the row takes (`Row.take`), and count them.

    Returns logits after them (tokens, vocab_size), float32.
    """
    logits = run_row(loaded, row, tokens)
    row.advance()
    return logits


class Gathering:
    """Merges the attention of a row over the ranks of a chain.

    done : layers in which that was done.
    """

    def __init__(self, loaded: LoadedModel, chain: Transport) -> None:
        self.loaded, self.chain, self.done = loaded, chain, 0

    def __call__(self, part: PartialAttention) -> PartialAttention:
        gathered = gather_parts(part, self.chain)
        self.done += 1  # before the merge, whose memory may run out on this rank only
        return merge_gathered(gathered)

    def complete(self, tokens: int) -> None:
        """Take part in the remaining transfers of a row that failed on this rank, so that others can finish."""
        heads = self.loaded.model.config.get_text_config().num_attention_heads
        layers = [shape for shape in self.loaded.shape.layers if shape.elements]
        for shape in layers[self.done :]:
            sizes = (1, heads, tokens, shape.out_dim)
            gather_parts(PartialAttention.of_nothing(sizes, self.loaded.device), self.chain)

    @torch.inference_mode()
    def run(self, row: Row, tokens: Sequence[int], keep: torch.Tensor | None = None) -> torch.Tensor:
        """Run a row of sharded prompts, of which this rank keeps a part; every rank of the chain calls this.

        A rank that fails completes its transfers (``failure``), so that all ranks raise the same error. Lengths do not
        change: the tokens can be run again, or with fewer prompts at a time.

        row : merges with this.
        tokens, keep : see `run_row`.

        Returns logits (rows, vocab_size), the same on every rank. Raises on all ranks: `MemoryError` if any ran out of
        memory, with those ranks; `DataError` if any could not read its rows of a stored document; `AgreementError` if
        ranks have run different tokens.
        """
        loaded, chain, self.done = self.loaded, self.chain, 0
        found = attempt(lambda: run_row(loaded, row, tokens, keep), loaded.tp_group, reads_stored=True)
        status, why = _DONE, ""
        if isinstance(found, Failure):
            status, why = _UNREADABLE if found.cause == "stored" else _SHORT, found.why
            if loaded.device.type == "cuda":
                torch.cuda.empty_cache()
            self.complete(len(tokens))
        digest = digest_of(tokens, row.lengths)
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


def why_never_packed(loaded: LoadedModel) -> str | None:
    """Return why models of this kind do not run packed; None if they may."""
    if loaded.shape.has_states:
        return "its recurrent layers keep one document's state at a time"
    if loaded.shape.counts_cache:
        return "its attention temperature depends on the length of the cache"
    if not loaded.attends_in_parts:
        return "its own attention attends to one document at a time"
    return None
