"""Our attention kernel: exact for all shapes that it takes, and refused for the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from chains import chain, greedy, single
from models import COMMON, prompt, random_model
from torch._subclasses.fake_tensor import FakeTensorMode

from kvr_mpi.model import LoadedModel, probe_shape
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.cpu_attention import DTYPES, OWN, CpuAttention, KernelLibrary
from kvr_mpi.model.kernels import ATTENTION_SLOT, PLAIN, always, forget_kernels, give_kernel, without_kernels
from kvr_mpi.model.unit_table import Unit, UnitTable
from kvr_mpi.prefill.self_check import check_chain


@pytest.fixture
def kernel(library: KernelLibrary) -> CpuAttention:
    return CpuAttention(library, always(OWN))


def draw(heads: int, kv_heads: int, queries: int, keys: int, dim: int) -> tuple[torch.Tensor, ...]:
    """Make tensors that lie by token, keys and values side by side as in a cache."""
    torch.manual_seed(queries + keys)
    query = torch.randn(1, queries, heads, dim).transpose(1, 2)
    one, other = torch.randn(1, keys, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)
    return query, one, other


def exact(query: Any, keys: Any, values: Any, scale: float, *, causal: bool, window: int | None = None) -> Any:
    """Output and log-sum-exp, in float64."""
    group, (queries, count) = query.shape[1] // keys.shape[1], (query.shape[2], keys.shape[2])
    keys, values = (each.double().repeat_interleave(group, dim=1) for each in (keys, values))
    scores = query.double() @ keys.transpose(-1, -2) * scale
    if causal:
        seen = torch.ones(queries, count).tril(count - queries).triu(count - queries + 1 - (window or count))
        scores = scores.masked_fill(seen == 0, -math.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("heads", [(9, 3), (7, 1), (2, 2)])
def test_it_is_exact(library: KernelLibrary, heads: tuple[int, int], dim: int, threads: int) -> None:
    """At the edges of its blocks, of queries and of keys."""
    torch.set_num_threads(threads)
    for count in ((1, 1), (1, 1025), (1, 2500), (12, 32), (13, 33), (25, 512), (11, 513), (100, 511), (300, 1300)):
        for dtype in DTYPES if dim == 64 or count[0] == 1 else DTYPES[:1]:
            tensors = [each.to(dtype) for each in draw(*heads, *count, dim)]
            for causal, window in ((False, None), (True, None), (True, 1), (True, 100), (True, 530)):
                out, lse = library.attend(*tensors, 0.2, causal=causal, window=window)
                truth = exact(*tensors, 0.2, causal=causal, window=window)
                assert out.dtype == lse.dtype == torch.float32
                torch.testing.assert_close(out.double(), truth[0], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(lse.double(), truth[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "dim"), [(1, 32), (3, 64), (4, 128), (9, 64)])
def test_heads_of_documents_of_any_length(
    library: KernelLibrary, group: int, dim: int, dtype: torch.dtype, threads: int
) -> None:
    torch.manual_seed(dim)
    torch.set_num_threads(threads)
    query = torch.randn(1, 4, 2 * group, dim).to(dtype).transpose(1, 2)  # of four documents with two KV heads
    lengths, firsts = [2100, 1024, 1525, 7], [3, 0, 500, 0]
    lasts = {(0, 0): 90, (0, 1): 2100, (1, 1): 1024, (2, 0): 1525, (3, 0): 7, (3, 1): 1}  # two heads dropped rows
    cuts = {(0, 1): 700, (2, 0): 200}  # two heads lie in two places, of one of which nothing is seen
    units, held, capacity = [], {}, 2200
    for (document, head), last in lasts.items():
        both = torch.randn(capacity, 2, dim).to(dtype)  # rows that do not follow each other
        both[: firsts[document]], both[last:] = math.nan, math.nan  # nothing of that is read
        keys, values = held[document, head] = both.unbind(1)
        cut = cuts.get((document, head), 0)
        if cut:
            units.append(Unit(document, head, keys[:cut], values[:cut], cut, grows=False))
        units.append(Unit(document, head, keys[cut:], values[cut:], last - lengths[document] - cut, first=cut))
    table = UnitTable(4, 2, units)
    assert library.takes_units(query, table)
    out, lse = library.attend_units(query, table, np.array(lengths), 0.2, np.array(firsts))
    for document, head in itertools.product(range(4), range(2)):
        rows = slice(head * group, head * group + group)
        if (document, head) not in lasts:
            assert not out[document, rows].any() and bool((lse[document, rows] == -math.inf).all())
            continue
        seen = slice(firsts[document], lasts[document, head])
        keys, values = (rows[None, None, seen].double() for rows in held[document, head])
        truth = exact(query[:, rows, document : document + 1].double(), keys, values, 0.2, causal=False)
        torch.testing.assert_close(out[None, document, rows].double(), truth[0][:, :, 0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[None, document, rows].double(), truth[1][:, :, 0], rtol=1e-5, atol=1e-5)


def test_several_queries_of_a_document_are_those_of_one_after_the_other(library: KernelLibrary) -> None:
    torch.manual_seed(5)
    rows = torch.randn(3, 2, 900, 64)
    units = [Unit(*of, rows[of], rows[of]) for of in ((0, 0), (0, 1), (1, 0), (2, 1))]
    shared = Unit(0, 1, rows[2, 0], rows[2, 0], 300, grows=False)
    table = UnitTable(3, 2, [*units[:1], shared, *units[1:]])
    documents, before = [0, 0, 0, 1, 2, 2], np.array([510, 511, 512, 3, 700, 701])
    query = torch.randn(1, 6, 6, 64)
    for firsts in (None, np.maximum(0, before - 200)):
        out, lse = library.attend_units(query, table, before + 1, 0.2, firsts, np.array([0, 3, 4, 6]))
        for at, document in enumerate(documents):
            lengths, some = np.full(3, 5), None if firsts is None else np.zeros(3, np.int64)
            lengths[document] = before[at] + 1
            if some is not None and firsts is not None:
                some[document] = firsts[at]
            one = library.attend_units(query[:, :, [at] * 3].contiguous(), table, lengths, 0.2, some)
            torch.testing.assert_close((out[at], lse[at]), (one[0][document], one[1][document]), rtol=1e-5, atol=1e-5)


def test_rows_beyond_the_memory_are_not_read(library: KernelLibrary) -> None:
    rows = torch.randn(20, 64)
    table = UnitTable(2, 1, [Unit(0, 0, rows, rows), Unit(1, 0, rows, rows, filled=5, grows=False)])
    new = torch.full((2, 1, 1, 2, 64), math.nan)
    for lengths in ([21, 3], [0, 3]):
        with pytest.raises(ValueError, match=rf"with room for 20, of documents of \[{lengths[0]}, 3\]"):
            library.attend_units(torch.randn(1, 3, 2, 64), table, np.array(lengths), 0.2, new=(new[0], new[1]))
    assert bool(rows.isfinite().all()), "nor is anything written"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3), (4, 1), (2, 2), (14, 2), (23, 1)])
def test_documents_that_share_rows_attend_as_each_alone(
    library: KernelLibrary, heads: tuple[int, int], dtype: torch.dtype, threads: int
) -> None:
    """With few queries and with panels of them, and the new tokens are written to each document's own rows."""
    torch.manual_seed(3)
    torch.set_num_threads(threads)
    (many, kv_heads), lengths = heads, [900 + 3, 900 + 40, 900 + 41, 900 + 300, 7]  # the middle two of one document
    edges, shared = np.array([0, 1, 3, 4, 5]), torch.randn(2, kv_heads, 900, 64).to(dtype)
    own = torch.randn(4, 2, kv_heads, 320, 64).to(dtype)
    query = torch.randn(1, 5, many, 64).to(dtype).transpose(1, 2)
    keys, values = torch.randn(2, 1, 5, kv_heads, 64).to(dtype).transpose(2, 3)
    units = [Unit(0, head, *shared[:, head], 900, grows=False, documents=3) for head in range(kv_heads)]
    befores = [-900, -900, -900, 0]
    for document, head in itertools.product(range(4), range(kv_heads)):
        units.append(Unit(document, head, *own[document, :, head], befores[document], first=900))
    table, before = UnitTable(4, kv_heads, units), own.clone()
    out, lse = library.attend_units(query, table, np.array(lengths), 0.2, edges=edges, new=(keys, values))
    for at, document in enumerate(np.repeat(range(4), np.diff(edges))):
        row = lengths[at] + befores[document] - 1
        before[document, 0, :, row], before[document, 1, :, row] = keys[0, :, at], values[0, :, at]
        mine = [
            unit._replace(document=0, documents=1)
            for unit in units
            if unit.document <= document < unit.document + unit.documents
        ]
        some = query[:, :, at : at + 1], UnitTable(1, kv_heads, mine), np.array(lengths[at : at + 1])
        truth = library.attend_units(*some, 0.2)
        torch.testing.assert_close((out[at : at + 1], lse[at : at + 1]), truth, rtol=1e-5, atol=1e-5)
    assert torch.equal(own, before)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, -30.0])
@pytest.mark.parametrize("queries", [1, 40])
def test_large_scores_and_small_ones(library: KernelLibrary, scale: float, queries: int) -> None:
    tensors = draw(2, 2, queries, 700, 64)
    found, truth = library.attend(*tensors, scale, causal=True), exact(*tensors, scale, causal=True)
    torch.testing.assert_close(found[0].double(), truth[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1].double(), truth[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_not_swallowed(library: KernelLibrary, bad: float, dtype: torch.dtype) -> None:
    for which, queries in itertools.product(range(3), (20, 1)):
        tensors = [each.to(dtype) for each in draw(2, 1, queries, 600, 64)]
        tensors[which][0, 0, 7 if which else 0, 5] = bad
        found, truth = library.attend(*tensors, 0.2, causal=False)[0], exact(*tensors, 0.2, causal=False)[0]
        assert not truth.isfinite().all()
        torch.testing.assert_close(found.isfinite(), truth.isfinite())


@pytest.mark.parametrize(
    "change",
    [
        lambda query, keys, values: (query.double(), keys.double(), values.double()),
        lambda query, keys, values: (query.double(), keys, values),
        lambda query, keys, values: (query[..., :24], keys[..., :24], values[..., :24]),
        lambda query, keys, values: (query, keys, values[..., :32]),
        lambda query, keys, values: (query, keys.transpose(-1, -2).contiguous().transpose(-1, -2), values),
        lambda *tensors: tuple(map(FakeTensorMode().from_tensor, tensors)),
    ],
)
def test_what_it_cannot_read_goes_to_torch(kernel: CpuAttention, change: Any) -> None:
    query, keys, values = draw(6, 2, 3, 90, 64)

    def takes(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> list[bool]:
        table = UnitTable(3, 2, [Unit(0, 0, keys[0, 0], values[0, 0])])
        return [kernel.takes(query, keys, values), kernel.takes_units(query, table)]

    assert takes(query, keys, values) == [True, True]
    assert takes(*change(query, keys, values)) == [False, False]
    assert not kernel.takes(query, keys[:, :, :0], values[:, :, :0])
    assert not kernel.takes_units(query, UnitTable(3, 2, []))
    slower = CpuAttention(kernel.library, (PLAIN, PLAIN, PLAIN, OWN))
    assert not slower.takes(query, keys, values), "for so few queries"
    assert not slower.takes_units(query[:, :, :1], UnitTable(1, 2, [Unit(0, 0, keys[0, 0], values[0, 0])]))


WIDE: dict[str, Any] = COMMON | {"hidden_size": 128, "num_attention_heads": 4}
CONFIGS: dict[str, Any] = {
    "llama": tf.LlamaConfig(**WIDE, num_key_value_heads=2),
    "mistral": tf.MistralConfig(**WIDE, num_key_value_heads=2, sliding_window=50),
    "falcon": tf.FalconConfig(**WIDE, num_kv_heads=2, new_decoder_architecture=True),
}


@pytest.fixture(params=CONFIGS)
def loaded(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """Models whose attention comes to us by either door, with heads that the kernel takes."""
    made = random_model(CONFIGS[request.param])
    yield made
    forget_kernels(made.model)


@pytest.fixture
def calls(kernel: CpuAttention, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the library's functions were called."""
    found: list[str] = []

    def count(name: str) -> None:
        own = getattr(kernel.library, name)
        monkeypatch.setattr(kernel.library, name, lambda *given, **more: (found.append(name), own(*given, **more))[1])

    count("attend")
    count("attend_units")
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_chains_with_it_equal_plain_transformers(
    loaded: LoadedModel, kernel: CpuAttention, calls: list[str], dtype: torch.dtype
) -> None:
    loaded = replace(loaded, model=loaded.model.to(dtype), dtype=dtype, shape=probe_shape(loaded.model.config, dtype))
    is_exact, truth = dtype == torch.float32, single(loaded, prompt(200))
    logits, plain = truth.logits, greedy(loaded.model, truth, 12)
    give_kernel(loaded.model, kernel)
    assert check_chain(loaded)
    for bounds in ((0, 200), (0, 101, 200), (0, 30, 31, 200)):
        calls.clear()
        after = chain(loaded, prompt(200), bounds, reserve=12)
        assert "attend" in calls and (not is_exact or float((after.logits - logits).abs().max()) < 1e-4)
    calls.clear()
    found = greedy(loaded.model, after, 12)
    assert calls.count("attend_units") >= 11 * len(loaded.shape.layers)
    assert found == plain if is_exact else found[0] == plain[0]
    with without_kernels(loaded.model):
        assert vars(loaded.model).get(ATTENTION_SLOT) is None
    assert vars(loaded.model).get(ATTENTION_SLOT) is kernel


def test_a_kernel_that_is_wrong_is_found_before_it_is_used(
    loaded: LoadedModel, kernel: CpuAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = kernel.library.attend
    monkeypatch.setattr(kernel.library, "attend", lambda *given, **how: [each * 1.01 for each in right(*given, **how)])
    give_kernel(loaded.model, kernel)
    prepare_model(loaded.model, chain=True)
    assert vars(loaded.model).get(ATTENTION_SLOT) is kernel
    check_chain(loaded)
    assert vars(loaded.model).get(ATTENTION_SLOT) is None
