"""The self-check before every batch: a chain of threads must reproduce this model's logits on a few tokens.

An architecture whose attention differs from our assumptions would otherwise give wrong answers for a whole corpus. What
depends on long prompts is checked without running them: rotary embeddings (``model.rope``) and masks (``model.masks``,
at every prefill).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvr_mpi.errors import ConfigError, ModelError
from kvr_mpi.kv.pool import Pool
from kvr_mpi.kv.row import Row
from kvr_mpi.logs import SILENT, RankLogger
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model, run_model
from kvr_mpi.model.kernels import forget_kernels
from kvr_mpi.model.rope import begins_anew_at, check_rotary
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import Continuation, Reference, Tensors, continued
from kvr_mpi.prefill.failure import FAILURES
from kvr_mpi.prefill.finite import explain_not_finite
from kvr_mpi.prefill.one_prompt import Prefill, plain_cache, prefill_kvr, prefill_single, prefill_whole
from kvr_mpi.prefill.packed import Gathering, decode_packed, prefill_packed, run_row, why_never_packed
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import run_local

# Minimum tokens of a check, and tokens of a chunk.
LEAST_TOKENS, CHECKED_CHUNK = 12, 2
# Maximum operations of a check, which take seconds. If exceeding a window takes more, the prompt is short.
MOST_FLOP = {"cpu": 2e12, "cuda": 2e14}
# Runs of the whole model that a check takes.
RUNS = 7
# Decoded after the prompt.
NEXT_TOKEN = 5
DECODED = "logits of a decoded token"
# Lengths of two documents that run together.
PACKED_TOKENS = 7, 4


def check_chain(loaded: LoadedModel, logger: RankLogger = SILENT) -> LoadedModel:
    """Verify on a few tokens that chains give this model's logits, and prepare the model for chains.

    Three ranks test slices of one token at both ends, which use other code paths; two ranks test a last slice that the
    last layer cuts to its last token. The prompt is longer than the smallest window or chunk.

    logger : told the result, and the reason if the model's attention cannot be replaced.

    Returns the model. Where our replacements do not work, its last layer computes all tokens, or its own attention runs
    over the whole prefix. Our kernels are dropped if they make the results differ. Raises `ModelError` if the model
    cannot run as a chain, or the logits differ.
    """
    check_rotary(loaded.model, loaded.shape.max_tokens)
    if loaded.shape.why_single is not None:
        raise ModelError(f"{loaded.shape.architecture}: {loaded.shape.why_single}; use strategy = 'single' for it")
    count = _tokens_for(loaded)
    truth = Reference(loaded, count, lambda ids: check_plain(loaded, ids).results)
    if not truth.is_finite():
        raise ModelError(
            f"{loaded.shape.architecture}: on {count} tokens of plain transformers, {explain_not_finite(loaded.dtype)}"
        )
    why = loaded.shape.why_whole
    if why is None and loaded.attends_in_parts:
        try:
            loaded = _check_in_parts(loaded, count, truth)
            _report(truth, logger)
            return loaded
        except ModelError as error:
            why = str(error)
    loaded = replace(loaded, attends_in_parts=False, cuts_last_layer=False)
    prepare_model(loaded.model, chain=True, in_parts=False)
    try:
        thirds, halves = Partition((0, 1, count - 1, count)), Partition((0, count // 2, count))
        _compare_all(loaded, [thirds, halves], truth)
    except ModelError as error:
        raise ModelError(_why_refused(loaded, count, why, str(error))) from error
    prepare_model(loaded.model, chain=True, in_parts=False)
    logger.info(
        f"{loaded.shape.architecture}: using the model's own attention over the whole prefix of a layer, since it "
        f"cannot be computed in parts ({why}): exact, but slower"
    )
    _report(truth, logger)
    return loaded


def _report(truth: Reference, logger: RankLogger) -> None:
    """Log that the check has passed, with the largest difference."""
    logger.info(
        f"exactness check passed: on a short prompt, logits differ from plain transformers by at most "
        f"{truth.difference:.0e} of their range"
    )


def check_plain(loaded: LoadedModel, ids: Sequence[int] = ()) -> Continuation:
    """Run a few tokens and one more with plain transformers, and leave the model prepared for that.

    Some models change for good with their first short prompt: BigBird leaves block-sparse attention. Without this, an
    answer would depend on the prompts before it.

    Raises `ModelError` if transformers' own code fails.
    """
    ids = ids or loaded.shape.sample_ids(_tokens_for(loaded))
    prepare_model(loaded.model, chain=False)
    try:
        return _follow(loaded, prefill_single(loaded.model, ids, loaded.device))
    except FAILURES as error:
        raise ModelError(
            f"{loaded.shape.architecture}: transformers' own code fails on {len(ids)} tokens and one more "
            f"({type(error).__name__}: {error}); neither chains nor strategy = 'single' can run it"
        ) from error


def _check_in_parts(loaded: LoadedModel, tokens: int, truth: Reference) -> LoadedModel:
    """Check chains that replace the model's attention, with the last layer cut if the model supports it."""
    prepare_model(loaded.model, chain=True)
    _compare_all(loaded, [Partition((0, 1, tokens - 1, tokens))], truth)
    halves = Partition((0, tokens // 2, tokens))
    try:
        _compare(loaded, halves, truth)
    except ModelError:
        loaded = replace(loaded, cuts_last_layer=False)
        _compare(loaded, halves, truth)
    prepare_model(loaded.model, chain=True)
    return loaded


def _compare_all(loaded: LoadedModel, partitions: Sequence[Partition], truth: Reference) -> None:
    """Compare some partitions; if one differs, compare all again without our kernels."""
    try:
        for partition in partitions:
            _compare(loaded, partition, truth)
    except ModelError:
        if not forget_kernels(loaded.model):
            raise
        _compare_all(loaded, partitions, truth)


def _tokens_for(loaded: LoadedModel) -> int:
    """Return a number of tokens that exceeds the smallest window or chunk, if the check stays short."""
    sizes = [layer.visibility.size for layer in loaded.shape.layers if layer.visibility.size]
    weights = sum(weight.numel() for weight in loaded.model.parameters())
    most = int(MOST_FLOP.get(loaded.device.type, MOST_FLOP["cpu"]) / (2 * weights * RUNS))
    wanted = LEAST_TOKENS if not sizes else min(sizes) + LEAST_TOKENS
    tokens = wanted if wanted <= max(most, LEAST_TOKENS) else LEAST_TOKENS
    return min(tokens, loaded.shape.max_tokens or tokens)


def _why_refused(loaded: LoadedModel, tokens: int, why_parts: str | None, why_whole: str) -> str:
    """Explain why a model does not run in either way, and whether transformers itself supports it."""
    name = loaded.shape.architecture
    if not _goes_on_from_cache(loaded, tokens):
        return (
            f"{name}: transformers' own code cannot continue from its cache with several tokens, so no rank can "
            f"continue from another; use strategy = 'single' for it"
        )
    return (
        f"{name} does not run as a chain: with attention in parts, {why_parts}; with its own attention, {why_whole}; "
        f"use strategy = 'single' for it"
    )


@torch.inference_mode()
def _goes_on_from_cache(loaded: LoadedModel, tokens: int) -> bool:
    """Whether plain transformers gives the same logits for a prompt in two pieces as for the whole."""
    prepare_model(loaded.model, chain=False)

    def in_pieces(ids: Sequence[int]) -> Tensors:
        cache, cut = plain_cache(loaded.model), tokens // 2
        run_model(loaded.model, torch.tensor([ids[:cut]], device=loaded.device), cache)
        return _logits(run_model(loaded.model, torch.tensor([ids[cut:]], device=loaded.device), cache)[0])

    def whole(ids: Sequence[int]) -> Tensors:
        return _logits(prefill_single(loaded.model, ids, loaded.device).logits)

    return Reference(loaded, tokens, whole).why_not(in_pieces) is None


def _compare(loaded: LoadedModel, partition: Partition, truth: Reference) -> None:
    """Run a chain of threads; raise `ModelError` unless its logits, keys and values agree with the reference."""

    def run(ids: Sequence[int]) -> Tensors:
        prepare_model(loaded.model, chain=True, in_parts=loaded.attends_in_parts)
        prefill = run_local(
            partition.size,
            lambda rank: prefill_kvr(loaded, ids, partition, rank, keeps_all=True, reserve_tokens=1),
            loaded.device,
        )[-1]
        return _follow(loaded, prefill).results

    if why := truth.why_not(run):
        raise ModelError(f"on {partition.tokens} tokens of a chain of {partition.size}, {why}")


def _logits(*found: torch.Tensor | None) -> Tensors:
    """Return logits as they are compared."""
    return {f"the logits of prompt {at}": each.cpu() for at, each in enumerate(found) if each is not None}


def _follow(loaded: LoadedModel, prefill: Prefill) -> Continuation:
    """Decode one given token after a prefill."""
    return continued(loaded.model, prefill, 1, loaded.shape.sample_ids(1, first=NEXT_TOKEN))


def check_chunks(loaded: LoadedModel) -> None:
    """Verify on a few tokens that a chain that computes its slices in chunks gives this model's logits.

    Raises `ModelError` if the model does not support chunks, or the logits differ.
    """
    tokens = min(LEAST_TOKENS, loaded.shape.max_tokens or LEAST_TOKENS)
    cut = Partition.even(tokens, 3)

    def in_chunks(ids: Sequence[int]) -> Tensors:
        ranks = run_local(
            3, lambda rank: prefill_kvr(loaded, ids, cut, rank, chunk_tokens=CHECKED_CHUNK), loaded.device
        )
        return _logits(ranks[-1].logits)

    whole = Reference(loaded, tokens, lambda ids: _logits(prefill_whole(loaded, ids).logits))
    if why := whole.why_not(in_chunks, "those of one rank"):
        raise ModelError(
            f"{loaded.shape.architecture}: in chunks of {CHECKED_CHUNK} of {tokens} tokens, {why}; leave "
            f"parallel.chunk_tokens out"
        )


def why_not_packed(loaded: LoadedModel, pool: Pool | None = None) -> str | None:
    """Run two small documents together and alone; return why this model cannot run packed, or None.

    The model has to be prepared for chains (`prepare_model`).

    pool : for the keys and values of the documents that run together.
    """
    if reason := why_never_packed(loaded):
        return reason

    @torch.inference_mode()
    def alone(ids: Sequence[int]) -> Tensors:
        found = [prefill_whole(loaded, prompt, reserve_tokens=1) for prompt in _cut(ids)]
        steps = [run_row(loaded, Row([each.cache]), [NEXT_TOKEN])[0] for each in found]
        return _logits(*(each.logits for each in found), *steps)

    @torch.inference_mode()
    def together(ids: Sequence[int]) -> Tensors:
        found = prefill_packed(loaded, _cut(ids), reserve_tokens=1, pool=pool)
        try:
            steps = decode_packed(loaded, Row([each.cache for each in found]), [NEXT_TOKEN] * len(found))
        finally:
            for each in found:
                each.release()
        return _logits(*(each.logits for each in found), *steps)

    why = Reference(loaded, sum(PACKED_TOKENS), alone).why_not(together, "each alone")
    return why and f"{loaded.shape.architecture} does not run packed: of two small documents together, {why}"


def _cut(ids: Sequence[int]) -> list[Sequence[int]]:
    """Cut ids into the prompts of `why_not_packed`."""
    first = PACKED_TOKENS[0]
    return [ids[:first], ids[first:]]


def check_spread(loaded: LoadedModel) -> None:
    """Verify that a model can decode a sharded document, with a small document on two threads.

    A model that counts positions by the tokens in its cache would continue from a rank's own share. The model has to be
    prepared for chains (`prepare_model`).

    Raises `ConfigError` if it cannot.
    """
    token = loaded.shape.sample_ids(1, first=NEXT_TOKEN)

    def decode(rank: Transport, ids: Sequence[int]) -> torch.Tensor:
        halves = Partition.even(len(ids), rank.size)
        found = prefill_kvr(loaded, ids, halves, rank, reserve_tokens=1, is_sharded=True)
        # Twice in one row, as in jobs: some models count positions by their cache, which is that of several prompts.
        gathering = Gathering(loaded, rank)
        return gathering.run(Row([found.cache] * 2, merge=gathering), 2 * token)

    def spread(ids: Sequence[int]) -> Tensors:
        return {DECODED: run_local(2, lambda rank: decode(rank, ids), loaded.device)[-1][0].cpu()}

    def alone(ids: Sequence[int]) -> Tensors:
        return {DECODED: _follow(loaded, prefill_whole(loaded, ids, reserve_tokens=1)).steps[0]}

    why: str | None = "its rotary embedding changes at some length, and the whole cache is then computed again"
    if begins_anew_at(loaded.model) is None:
        why = why_never_packed(loaded)
    if why is None:
        why = Reference(loaded, LEAST_TOKENS, alone).why_not(spread, "those of one rank")
    if why is not None:
        raise ConfigError(
            f"keys and values of {loaded.shape.architecture} cannot be spread over ranks: {why}. Leave output.kv = "
            f"'sharded' and parallel.ranks_per_chain out"
        )
