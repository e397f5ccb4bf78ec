"""Prefill several short prompts in one row, and decode one token each of many answers (``kv.row``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, Literal

import torch

from kvr_mpi.compress.compression import size_of
from kvr_mpi.kv.chain import Retain
from kvr_mpi.kv.pool import Pool
from kvr_mpi.kv.row import Row
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import run_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.failure import Failure, attempt
from kvr_mpi.prefill.one_prompt import Prefill, pool_for, prefill_whole, wait_for_compute
from kvr_mpi.prefill.reading import Reading

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
) -> list[Prefill]:
    """Prefill several short prompts in one forward pass, each exactly as alone (`prefill_kvr` on one rank).

    If memory runs out, the prompts are split into halves; one that does not fit alone gets a `Prefill.error`.

    prompts : at least one, none of them empty.
    reserve_tokens : room for decoded tokens, the same for all prompts or for each.
    prefix : prefix of all prompts, if it has been computed; the prompts still contain it.
    retain : for a single prompt: what its heads keep.
    pool : for keys and values; None: `pool_for`.
    readings : what is read of each prompt instead of its logits, of all of them the same; empty: nothing.

    Returns a prefill for each prompt, with its own cache; `seconds` covers the whole forward pass. Raises `DataError`
    if the prefix is stored, and cannot be read.
    """
    assert retain is None or len(prompts) == 1, "prompts that are compressed run one by one"
    reserves = [reserve_tokens] * len(prompts) if isinstance(reserve_tokens, int) else reserve_tokens
    pool, is_compressed = pool or pool_for(loaded, prefix), prefix is not None and bool(prefix.compression)
    if (len(prompts) == 1 and not is_compressed) or why_never_packed(loaded):
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
    began = time.perf_counter()
    found = attempt(lambda: _prefill_row(loaded, prompts, reserves, prefix, pool, readings), loaded.tp_group)
    if not isinstance(found, Failure):
        return found
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()
    if len(prompts) == 1:
        assert prefix is not None, "others run as a slice"
        new = len(prompts[0]) - prefix.length
        why = f"not enough memory for its {prefix.length} stored tokens and {new} more: {found.why}"
        seconds = time.perf_counter() - began
        return [Prefill(Partition((0, len(prompts[0]))), None, None, seconds, error=why, known_tokens=prefix.length)]
    half = len(prompts) // 2
    return [
        prefill
        for some in (slice(None, half), slice(half, None))
        for prefill in prefill_packed(
            loaded,
            prompts[some],
            reserve_tokens=reserves[some],
            prefix=prefix,
            pool=pool,
            readings=readings[some],
        )
    ]


@torch.inference_mode()
def _prefill_row(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    reserves: Sequence[int],
    prefix: SequenceKV | None,
    pool: Pool,
    readings: Sequence[Reading],
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
        row = Row(sequences, [len(ids) - start for ids in prompts], reads="all" if reads_all else "last")
        tokens = [token for ids in prompts for token in ids[start:]]
        outputs: list[dict[str, Any]]
        if readings:
            states = run_row(loaded, row, tokens, reads="states")
            each_states = (states[first:last] for first, last in row.bounds)
            outputs = [
                {"logits": None, "read": reading.join([reading.read(loaded, ids, start, own)], len(ids))}
                for ids, reading, own in zip(prompts, readings, each_states, strict=True)
            ]
        else:
            last_rows = torch.tensor([last - 1 for _, last in row.bounds], device=loaded.device)
            outputs = [{"logits": each.clone()} for each in run_row(loaded, row, tokens, last_rows)]
        row.advance()
        wait_for_compute(loaded.device)
    except BaseException:
        for sequence in sequences:
            sequence.release()
        raise
    seconds = time.perf_counter() - began
    prefills = [
        Prefill(
            Partition((0, len(ids))),
            sequence,
            seconds=seconds,
            **output,
            known_tokens=start,
            began_s=began,
            row_share=(len(ids) - start) / row.bounds[-1][1],
        )
        for ids, sequence, output in zip(prompts, sequences, outputs, strict=True)
    ]
    if prefix is not None and prefix.compression:
        for prefill in prefills:
            prefill.retained = size_of(loaded, prefill.cache, prefix.compression)
    return prefills


def run_row(
    loaded: LoadedModel,
    row: Row,
    tokens: Sequence[int],
    keep: torch.Tensor | None = None,
    reads: Literal["logits", "states"] = "logits",
) -> torch.Tensor:
    """Run the model on the new tokens of a row; return logits (rows, vocab_size), float32, or what it `reads`.

    Lengths do not change: `Row.advance` counts the tokens.

    keep : indices of the tokens whose logits are returned (rows,); by default, the last one.
    """
    positions = row.positions if len(row.sequences) > 1 else None
    ids = torch.tensor([list(tokens)], device=loaded.device)
    return run_model(loaded.model, ids, row, positions=positions, keep=keep, reads=reads)


@torch.inference_mode()
def decode_packed(
    loaded: LoadedModel,
    row: Row,
    tokens: Sequence[int],
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Run one more token of each sequence, or as many as the row takes (`Row.take`).

    tokens : of all sequences, in order.
    run : called instead of `run_step`.

    Returns logits after them (tokens, vocab_size), float32.
    """
    inputs = torch.tensor([list(tokens), row.begin()], device=loaded.device)
    logits = run_step(loaded, row, inputs) if run is None else run(inputs)
    row.advance()
    return logits


def run_step(loaded: LoadedModel, row: Row, inputs: torch.Tensor) -> torch.Tensor:
    """Run the model on the tokens of a step, after `Row.begin`.

    inputs : the tokens, and the tokens of their sequence before each (2, tokens), int64 on the device.

    Returns logits (tokens, vocab_size), float32.
    """
    if row.is_paged:
        row.advance_table(inputs[1])
    keep = torch.arange(inputs.shape[1], device=inputs.device)
    positions = inputs[1:] + loaded.shape.first_position
    return run_model(loaded.model, inputs[:1], row, positions=positions, keep=keep)


def why_never_packed(loaded: LoadedModel) -> str | None:
    """Return why models of this kind do not run packed; None if they may."""
    if loaded.shape.has_states:
        return "its recurrent layers keep one document's state at a time"
    if loaded.shape.counts_cache:
        return "its attention temperature depends on the length of the cache"
    if not loaded.attends_in_parts:
        return "its own attention attends to one document at a time"
    return None
