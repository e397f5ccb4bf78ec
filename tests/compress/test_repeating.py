"""KVzip: scores are the highest weights of a plain pass that repeats the text, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import prompt, tiny

from kvr_mpi.compress import repeating
from kvr_mpi.compress.compression import Compression, open_compression, size_of
from kvr_mpi.compress.repeating import repeat_scores
from kvr_mpi.compress.settings import CompressSettings
from kvr_mpi.errors import DocumentError
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import compute_prefix, prefill_kvr
from kvr_mpi.transport.local import run_local

TOKENS, TEXT, INSTRUCTION = 90, (10, 75), (7, 8, 9)
LINK, CHUNK = 4, 25


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks, the last of them shorter."""
    monkeypatch.setattr(repeating, "CHUNK_TOKENS", CHUNK)
    monkeypatch.setattr(repeating, "LINK_TOKENS", LINK)


def opened(name: str, budget: float = 0.3) -> Compression:
    return open_compression(CompressSettings(method="kvzip", budget=budget), tiny(name), INSTRUCTION)


def prefilled(name: str, ranks: int, known: int = 0) -> SequenceKV:
    """What the rank with the last slice holds, uncompressed."""
    loaded, ids = tiny(name), prompt(TOKENS)
    prepare_model(loaded.model, chain=True)
    options: dict[str, Any] = {"prefix": compute_prefix(loaded, ids[:known]) if known else None, "keeps_all": True}
    cut = Partition.even(TOKENS - known, ranks).after(known)
    found = run_local(ranks, lambda rank: prefill_kvr(loaded, ids, cut, rank, **options))
    (cache,) = (one.cache for one in found if one.logits is not None)
    assert isinstance(cache, SequenceKV)
    return cache


def plain_scores(name: str) -> torch.Tensor:
    """The highest weights in transformers' own attention, a pass for each chunk (layers, heads, tokens)."""
    loaded, ids, (start, stop), found = tiny(name), prompt(TOKENS), TEXT, []
    loaded.model.set_attn_implementation("eager")
    for first in range(start, stop, CHUNK):
        last = min(stop, first + CHUNK)
        whole = [*ids[:stop], *INSTRUCTION, *ids[max(start, first - LINK) : last]]
        with torch.inference_mode():
            layers = loaded.model(torch.tensor([whole]), output_attentions=True).attentions
        kv_heads = loaded.shape.layers[0].num_kv_heads
        found.append(
            torch.stack([each[0, :, stop:, first:last].unflatten(0, (kv_heads, -1)).amax((1, 2)) for each in layers])
        )
    return torch.cat(found, -1)


@pytest.mark.parametrize(
    "name", ["llama-gqa", "llama-mha", "gpt2", "qwen2-some-windows", "gemma2-softcap", "gpt-oss-sinks"]
)
def test_scores_are_the_highest_weights_of_a_plain_pass(name: str) -> None:
    layers = opened(name).layers
    expected = plain_scores(name)[list(layers)]
    for ranks, known in ((1, 0), (2, 0), (2, 9)):
        found = repeat_scores(prefilled(name, ranks, known), prompt(TOKENS), TEXT, INSTRUCTION, layers)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_best_tokens_of_all_heads_are_kept_with_their_keys(ranks: int) -> None:
    compression, cache = opened("llama-gqa"), prefilled("llama-gqa", ranks)
    loaded, before = cache.loaded, [cache.rows(idx, 0, TOKENS) for idx in range(3)]
    copies = [(keys.clone(), values.clone()) for keys, values in before]
    drop = compression.planned_drop(TOKENS, TEXT)
    compression.repeat(cache, prompt(TOKENS), TEXT)
    scores, kept, left, counts = plain_scores("llama-gqa"), [], [], []
    for idx, heads in enumerate([cache.kept_positions(idx) for idx in range(3)]):
        for head, positions in enumerate(heads):
            inside = [at for at in positions.tolist() if TEXT[0] <= at < TEXT[1]]
            outside = [at for at in range(TOKENS) if not TEXT[0] <= at < TEXT[1]]
            assert sorted({*positions.tolist()} - {*inside}) == outside, "all that is not text"
            of_head = scores[idx, head]
            kept += [float(of_head[at - TEXT[0]]) for at in inside]
            left += [float(of_head[at - TEXT[0]]) for at in range(*TEXT) if at not in inside]
            counts.append(len(inside))
            ((keys, values),) = cache.head_pieces(idx, head)
            for mine, theirs in zip((keys, values), copies[idx], strict=True):
                torch.testing.assert_close(mine, theirs[0, head, positions.long()], rtol=0, atol=0)
    assert len(kept) == 3 * 2 * 20 and min(kept) >= max(left) - 1e-6, "0.3 of 65 tokens, the best of all heads"
    assert len(set(counts)) > 1, "or heads did not compete"
    size = size_of(loaded, cache, "kvzip")
    assert drop is not None and size.kv_bytes == TOKENS * loaded.shape.kv_bytes_per_token - drop.kv_bytes


def test_what_cannot_be_repeated_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kvzip.*observe"):
        CompressSettings(method="kvzip", budget=0.5, observes="question")
    assert opened("llama-gqa", budget=70).retain(TOKENS, TEXT) is None, "a short text is kept whole"
    assert opened("llama-gqa").retain(TOKENS, TEXT) is not None
    with pytest.raises(DocumentError, match="context has 512 tokens; set prompt.max_tokens to at most 441"):
        opened("llama-gqa").retain(470, (10, 460))
