"""The self-check before every batch: a chain of threads must reproduce this model's logits on a few tokens.

An architecture whose attention differs from our assumptions would otherwise give wrong answers for a whole corpus. What
depends on long prompts is checked without running them: rotary embeddings (``model.rope``) and masks (``model.masks``,
at every prefill).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kvr_mpi.errors import ConfigError, ModelError, Say
from kvr_mpi.kv.arena import Arena
from kvr_mpi.kv.decode_cache import DecodeCache
from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model, run_model
from kvr_mpi.model.kernels import forget_kernels
from kvr_mpi.model.rope import begins_anew_at, check_rotary
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.exactness import Continuation, continued, differences, error_share, why_not_the_same
from kvr_mpi.prefill.failure import FAILURES
from kvr_mpi.prefill.one_prompt import Prefill, plain_cache, prefill_kvr, prefill_single, prefill_whole
from kvr_mpi.prefill.packed import decode_packed, prefill_packed, why_never_packed
from kvr_mpi.prefill.stored_shares import run_shares
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


def check_chain(loaded: LoadedModel, say: Say | None = None) -> LoadedModel:
    """Verify on a few tokens that chains give this model's logits, and prepare the model for chains.

    Three ranks test slices of one token at both ends, which use other code paths; two ranks test a last slice that the
    last layer cuts to its last token. The prompt is longer than the smallest window or chunk.

    say : called with the reason, if the model's attention cannot be replaced.

    Returns the model. Where our replacements do not work, its last layer computes all tokens, or its own attention runs
    over the whole prefix. Our kernels are dropped if they make the results differ. Raises `ModelError` if the model
    cannot run as a chain, or the logits differ.
    """
    check_rotary(loaded.model, loaded.shape.max_tokens)
    if loaded.shape.why_single is not None:
        raise ModelError(f"{loaded.shape.architecture}: {loaded.shape.why_single}; use strategy = 'single' for it")
    count = _tokens_for(loaded)
    ids = loaded.shape.sample_ids(count)
    truth = check_plain(loaded, ids)
    why = loaded.shape.why_whole
    if why is None and loaded.attends_in_parts:
        try:
            return _check_in_parts(loaded, ids, truth)
        except ModelError as error:
            why = str(error)
    loaded = replace(loaded, attends_in_parts=False, cuts_last_layer=False)
    prepare_model(loaded.model, chain=True, in_parts=False)
    try:
        thirds, halves = Partition((0, 1, count - 1, count)), Partition((0, count // 2, count))
        _compare_all(loaded, ids, [thirds, halves], truth)
    except ModelError as error:
        raise ModelError(_why_refused(loaded, ids, why, str(error))) from error
    if say is not None:
        say(
            f"{loaded.shape.architecture}: using the model's own attention over the whole prefix of a layer, since it "
            f"cannot be computed in parts ({why}): exact, but slower"
        )
    return loaded


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


def _check_in_parts(loaded: LoadedModel, ids: Sequence[int], truth: Continuation) -> LoadedModel:
    """Check chains that replace the model's attention, with the last layer cut if the model supports it."""
    prepare_model(loaded.model, chain=True)
    tokens = len(ids)
    _compare_all(loaded, ids, [Partition((0, 1, tokens - 1, tokens))], truth)
    halves = Partition((0, tokens // 2, tokens))
    try:
        _compare(loaded, ids, halves, truth)
    except ModelError:
        loaded = replace(loaded, cuts_last_layer=False)
        _compare(loaded, ids, halves, truth)
    return loaded


def _compare_all(loaded: LoadedModel, ids: Sequence[int], partitions: Sequence[Partition], truth: Continuation) -> None:
    """Compare some partitions; if one differs, compare all again without our kernels."""
    try:
        for partition in partitions:
            _compare(loaded, ids, partition, truth)
    except ModelError:
        if not forget_kernels(loaded.model):
            raise
        _compare_all(loaded, ids, partitions, truth)


def _tokens_for(loaded: LoadedModel) -> int:
    """Return a number of tokens that exceeds the smallest window or chunk, if the check stays short."""
    sizes = [layer.visibility.size for layer in loaded.shape.layers if layer.visibility.size]
    weights = sum(weight.numel() for weight in loaded.model.parameters())
    most = int(MOST_FLOP.get(loaded.device.type, MOST_FLOP["cpu"]) / (2 * weights * RUNS))
    wanted = LEAST_TOKENS if not sizes else min(sizes) + LEAST_TOKENS
    tokens = wanted if wanted <= max(most, LEAST_TOKENS) else LEAST_TOKENS
    return min(tokens, loaded.shape.max_tokens or tokens)


def _why_refused(loaded: LoadedModel, ids: Sequence[int], why_parts: str | None, why_whole: str) -> str:
    """Explain why a model does not run in either way, and whether transformers itself supports it."""
    name = loaded.shape.architecture
    if not _goes_on_from_cache(loaded, ids):
        return (
            f"{name}: transformers' own code cannot continue from its cache with several tokens, so no rank can "
            f"continue from another; use strategy = 'single' for it"
        )
    return (
        f"{name} does not run as a chain: with attention in parts, {why_parts}; with its own attention, {why_whole}; "
        f"use strategy = 'single' for it"
    )


@torch.inference_mode()
def _goes_on_from_cache(loaded: LoadedModel, ids: Sequence[int]) -> bool:
    """Whether plain transformers gives the same logits for a prompt in two pieces as for the whole."""
    prepare_model(loaded.model, chain=False)
    truth, cut = prefill_single(loaded.model, ids, loaded.device).logits, len(ids) // 2

    def run() -> Iterator[tuple[str, float]]:
        cache = plain_cache(loaded.model)
        run_model(loaded.model, torch.tensor([ids[:cut]], device=loaded.device), cache)
        found = run_model(loaded.model, torch.tensor([ids[cut:]], device=loaded.device), cache)[0]
        yield "the logits", error_share(found, truth)

    return why_not_the_same(loaded, run) is None


def _compare(loaded: LoadedModel, ids: Sequence[int], partition: Partition, truth: Continuation) -> None:
    """Run a chain of threads; raise `ModelError` unless its logits, keys and values agree with the reference."""

    def run() -> Iterator[tuple[str, float]]:
        prefill = run_local(
            partition.size,
            lambda rank: prefill_kvr(loaded, ids, partition, rank, keeps_all=True, reserve_tokens=1),
            loaded.device,
        )[-1]
        return differences(_follow(loaded, prefill), truth)

    if why := why_not_the_same(loaded, run):
        raise ModelError(f"on {len(ids)} tokens of a chain of {partition.size}, {why}")


def _follow(loaded: LoadedModel, prefill: Prefill) -> Continuation:
    """Decode one given token after a prefill."""
    return continued(loaded.model, prefill, 1, loaded.shape.sample_ids(1, first=NEXT_TOKEN))


def check_chunks(loaded: LoadedModel) -> None:
    """Verify on a few tokens that a chain that computes its slices in chunks gives this model's logits.

    Raises `ModelError` if the model does not support chunks, or the logits differ.
    """
    tokens = min(LEAST_TOKENS, loaded.shape.max_tokens or LEAST_TOKENS)
    ids, cut = loaded.shape.sample_ids(tokens), Partition.even(tokens, 3)

    def run() -> Iterator[tuple[str, float]]:
        ranks = run_local(
            3, lambda rank: prefill_kvr(loaded, ids, cut, rank, chunk_tokens=CHECKED_CHUNK), loaded.device
        )
        yield "the logits of a chain in chunks", error_share(ranks[-1].logits, prefill_whole(loaded, ids).logits)

    if why := why_not_the_same(loaded, run, "those of one rank"):
        raise ModelError(f"{loaded.shape.architecture}: on {tokens} tokens {why}; leave parallel.chunk_tokens out")


def why_not_packed(loaded: LoadedModel, arena: Arena | None = None) -> str | None:
    """Run two small documents together and alone; return why this model cannot run packed, or None.

    The model has to be prepared for chains (`prepare_model`).

    arena : page pool of the documents that run together.
    """
    if reason := why_never_packed(loaded):
        return reason
    prompts = [loaded.shape.sample_ids(many, first=11 * (many + 1)) for many in (7, 4)]

    @torch.inference_mode()
    def run() -> Iterator[tuple[str, float]]:
        alone = [prefill_whole(loaded, ids, reserve_tokens=1) for ids in prompts]
        together = prefill_packed(loaded, prompts, reserve_tokens=1, arena=arena)
        founds = [each.logits for each in together]
        founds += decode_packed(loaded, DecodeCache([each.cache for each in together]), [NEXT_TOKEN] * 2)
        truths = [each.logits for each in alone]
        token = torch.tensor([[NEXT_TOKEN]], device=loaded.device)
        truths += [run_model(loaded.model, token, each.cache)[0] for each in alone]
        return (("two small documents together", error_share(*pair)) for pair in zip(founds, truths, strict=True))

    why = why_not_the_same(loaded, run, "each alone")
    return why and f"{loaded.shape.architecture} does not run packed: {why}"


def check_spread(loaded: LoadedModel) -> None:
    """Verify that a model can decode a sharded document, with a small document on two threads.

    A model that counts positions by the tokens in its cache would continue from a rank's own share. The model has to be
    prepared for chains (`prepare_model`).

    Raises `ConfigError` if it cannot.
    """
    ids, token = loaded.shape.sample_ids(LEAST_TOKENS), loaded.shape.sample_ids(1, first=NEXT_TOKEN)

    def decode(rank: Transport) -> torch.Tensor:
        halves = Partition.even(len(ids), rank.size)
        share = prefill_kvr(loaded, ids, halves, rank, reserve_tokens=1, is_spread=True).share
        assert share is not None, "its keys and values stay spread over the ranks"
        return run_shares(loaded, [share], [token], rank)

    def run() -> Iterator[tuple[str, float]]:
        alone = prefill_whole(loaded, ids, reserve_tokens=1)
        truth, found = _follow(loaded, alone).steps[0], run_local(2, decode, loaded.device)[-1]
        yield "logits of a decoded token", error_share(found[0].cpu(), truth)

    why: str | None = "its rotary embedding changes at some length, and the whole cache is then computed again"
    if begins_anew_at(loaded.model) is None:
        why = why_never_packed(loaded) or why_not_the_same(loaded, run, "those of one rank")
    if why is not None:
        raise ConfigError(
            f"keys and values of {loaded.shape.architecture} cannot be spread over ranks: {why}. Leave output.kv = "
            f"'sharded' and parallel.ranks_per_chain out"
        )
