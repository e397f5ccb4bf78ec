"""Products of 16-bit rows and weights are those of float64, rounded once, and the weights are not copied."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chains import chain, greedy, single
from models import prompt, tiny

from kvr_mpi.model import probe_shape
from kvr_mpi.model.cpu_attention import HALVES, HEADERS, KernelLibrary
from kvr_mpi.model.kernels import PLAIN, always, forget_kernels, kernel_bytes
from kvr_mpi.model.products import WIDENED, Product, find_products, give_products
from kvr_mpi.prefill.exactness import allowed_error, error_share
from kvr_mpi.tuning.compiled_attention import find_compiler, run_compiler

BOTH = pytest.mark.parametrize("dtype", HALVES)


@BOTH
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("outs", "features"), [(1, 1), (3, 64), (33, 7), (71, 96), (300, 384), (577, 1000), (1100, 32)]
)
def test_products_are_rounded_once(
    library: KernelLibrary, outs: int, features: int, threads: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.set_num_threads(threads)
    whole, added = torch.randn(outs, features + 40).to(dtype), torch.randn(outs).to(dtype)
    weight = whole[:, 3 : features + 3]  # some of the features of a layer, as of a rank's heads
    for count in (0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 384, 401):
        rows = torch.randn(1, count, 2 * features).to(dtype)[..., ::2]  # not next to each other
        got = library.multiply_halves(rows, weight, added if bias else None)
        wanted = rows.double() @ weight.double().T + (added.double() if bias else 0)
        assert got.shape == (1, count, outs) and got.dtype == dtype
        within = 0.501 * torch.finfo(dtype).eps * wanted.abs() + 1e-6 * (
            1 + rows.double().abs() @ weight.double().abs().T
        )
        assert bool(((got - wanted).abs() <= within).all())


@BOTH
def test_what_is_no_number_stays_in_its_row(library: KernelLibrary, dtype: torch.dtype) -> None:
    for count in (8, 40):
        rows, weight = torch.randn(count, 96).to(dtype), torch.randn(64, 96).to(dtype)
        rows[3], weight[5] = float("nan"), float("inf")
        found = library.multiply_halves(rows, weight, None)
        assert found[3].isnan().all() and not found[:, 5].isfinite().any()
        found[3], found[:, 5] = 0, 0
        assert found.isfinite().all()
    with pytest.raises(ValueError, match="expected plain ones of torch.float16"):
        library.multiply_halves(rows.float(), weight.half(), None)


@pytest.mark.parametrize("option", ["", "-mno-f16c -mno-avx512f"])
def test_every_16_bit_number_is_widened_and_rounded_as_by_torch(tmp_path: Path, option: str) -> None:
    """Also on processors without instructions for it."""
    compiler = find_compiler()
    if compiler is None or (option and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512")):
        pytest.skip("no compiler, or not for this processor")
    for each in HEADERS:
        shutil.copy(each, tmp_path)
    (tmp_path / "numbers.cpp").write_text("""#include "halves.h"
    template <class Number> static void widen(const Number *from, float *to, long count) {
        for (long i = 0; i < count; i += LANES) store(to + i, load_some(from + i, count - i));
    }
    template <class Number> static void round(const float *from, Number *to, long count) {
        for (long i = 0; i < count; i += LANES) store_some(to + i, load(from + i), count - i);
    }
    extern "C" {
    void widen_bfloat16(const BFloat16 *from, float *to, long count) { widen(from, to, count); }
    void widen_float16(const Float16 *from, float *to, long count) { widen(from, to, count); }
    void round_bfloat16(const float *from, BFloat16 *to, long count) { round(from, to, count); }
    void round_float16(const float *from, Float16 *to, long count) { round(from, to, count); }
    }""")
    made = tmp_path / "numbers.so"
    assert not run_compiler(f"{compiler} {option}", [tmp_path / "numbers.cpp"], made)
    numbers = ctypes.CDLL(str(made))

    def call(name: str, given: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        sizes = ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(made.data_ptr()), ctypes.c_long(given.numel())
        getattr(numbers, f"{name}_{str(dtype).removeprefix('torch.')}")(*sizes)
        return made

    for dtype in HALVES:
        every = torch.arange(1 << 16).to(torch.uint16).view(dtype)
        wide = call("widen", every, torch.empty(1 << 16))
        torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
        finite = wide[wide.isfinite()]
        # On both sides of the middle between two numbers, and on it; and beyond the largest number.
        middles = torch.cat([(finite[1:] + finite[:-1]) / 2, finite, torch.tensor([3e38, -7e4, float("nan")])])
        for near in (middles, middles.nextafter(torch.tensor(1e38)), middles.nextafter(torch.tensor(-1e38))):
            near = torch.cat([near, torch.zeros(-len(near) % 16)])
            found = call("round", near, torch.empty(len(near), dtype=dtype))
            torch.testing.assert_close(found, near.to(dtype), rtol=0, atol=0, equal_nan=True)


@BOTH
def test_a_chain_that_widens_its_weights_copies_none(
    library: KernelLibrary, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    loaded = tiny.__wrapped__("llama-gqa")
    loaded = replace(loaded, model=loaded.model.to(dtype), dtype=dtype, shape=probe_shape(loaded.model.config, dtype))
    ids = prompt(60)
    truth = single(loaded, ids)
    assert truth.logits is not None
    logits, answer = truth.logits, greedy(loaded.model, truth, 1)
    calls, multiply = [], library.multiply_halves
    monkeypatch.setattr(library, "multiply_halves", lambda *given: calls.append(given[1]) or multiply(*given))
    layers = [layer for each in find_products(loaded.model).values() for layer in each]
    give_products(loaded.model, dict.fromkeys(find_products(loaded.model), always(WIDENED)), library)
    found = chain(loaded, ids, (0, 31, 60), reserve=1)
    assert kernel_bytes(loaded.model) == 0
    assert {each.data_ptr() for each in calls} == {layer.weight.data_ptr() for layer in layers}
    assert found.logits is not None and error_share(found.logits, logits) <= allowed_error(dtype)
    assert greedy(loaded.model, found, 1) == answer
    forget_kernels(loaded.model)


def test_other_layers_use_torch(library: KernelLibrary) -> None:
    layer, rows = torch.nn.Linear(64, 48), torch.randn(3, 64)
    with torch.inference_mode():
        assert torch.equal(Product(layer, always(WIDENED), library)(rows), layer(rows))
        layer, rows = layer.bfloat16(), rows.bfloat16()
        for ways in (always(WIDENED), (PLAIN, PLAIN, WIDENED, WIDENED)):
            assert torch.equal(Product(layer, ways, None)(rows), layer(rows))
