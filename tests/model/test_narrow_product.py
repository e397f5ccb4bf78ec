"""Weights in fewer bits are exactly the same numbers, or are not kept so; products of them are those of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvr_mpi.model.cpu_attention import KernelLibrary
from kvr_mpi.model.kernels import PLAIN, always
from kvr_mpi.model.narrow_product import BLOCK, NARROW
from kvr_mpi.model.products import PANELS, PREPACKED, Product, narrow_weights


def halves(outs: int, features: int) -> torch.Tensor:
    return torch.randn(outs, features).bfloat16().float()


def steps(outs: int, features: int) -> torch.Tensor:
    """As llama.cpp dequantises Q4_1: the least and the largest step are in every block."""
    each = torch.randint(0, 16, (outs, features // BLOCK, BLOCK))
    each[..., 3], each[..., 30] = 0, 15
    step, least = torch.rand(outs, features // BLOCK, 1).half().float(), torch.randn(outs, features // BLOCK, 1).half()
    return (each.float() * step + least.float()).view(outs, features)


def tiny_steps(outs: int, features: int) -> torch.Tensor:
    """With steps below the smallest normal number of half precision, which has fewer digits there."""
    each = torch.randint(0, 16, (outs, features // BLOCK, BLOCK))
    each[..., 3], each[..., 30] = 0, 15
    return (each.float() * (torch.rand(outs, features // BLOCK, 1) * 2e-5).half().float()).view(outs, features)


def multiples(outs: int, features: int) -> torch.Tensor:
    """As llama.cpp dequantises Q8_0: every block has 127 or -127 times its scale."""
    each = torch.randint(-127, 128, (outs, features // BLOCK, BLOCK))
    each[..., 5] = -127
    return (each.float() * torch.rand(outs, features // BLOCK, 1).half().float()).view(outs, features)


@pytest.mark.parametrize(
    ("make", "share"), [(halves, 1 / 2), (multiples, 9 / 32), (steps, 3 / 16), (tiny_steps, 3 / 16)]
)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda weight: weight[5].mul_(1 + 2**-20),  # one weight alone may be zero
        lambda weight: weight[9].fill_(float("nan")).view(torch.int32).add_(1),
        lambda weight: weight[0, 0].copy_(torch.tensor(1e-3)),
    ],
)
def test_weights_come_back_to_the_bit_or_are_left_as_they_are(
    library: KernelLibrary, make: Any, share: float, spoil: Any
) -> None:
    weight = make(901, 64)
    found = library.narrow(weight)
    assert found is not None and found.nbytes == share * weight.nbytes
    assert torch.equal(found.widen().view(torch.int32), weight.view(torch.int32))
    spoil(weight)
    assert library.narrow(weight) is None


@pytest.mark.parametrize("make", [halves, multiples, steps])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5])
def test_signs_of_zero_and_blocks_of_one_number(library: KernelLibrary, make: Any, value: float) -> None:
    weight = make(16, 64)
    weight[3, :32] = value
    found = library.narrow(weight)
    fits = make is halves or (str(value) != "-0.0" and not (make is multiples and value))  # 127 times a short scale
    assert (found is not None) == fits
    assert found is None or torch.equal(found.widen().view(torch.int32), weight.view(torch.int32))


@pytest.mark.parametrize("make", [halves, multiples, steps])
@pytest.mark.parametrize(("outs", "features"), [(16, 32), (67, 96), (192, 576), (300, 1536)])
@pytest.mark.parametrize("threads", [1, 2])
def test_products_are_those_of_the_weights(
    library: KernelLibrary, make: Any, outs: int, features: int, threads: int
) -> None:
    weight = make(outs, features)
    found = library.narrow(weight)
    assert found is not None
    torch.set_num_threads(threads)
    for count in (1, 2, 3, 4, 5, 8, 9, 17):
        rows = torch.randn(1, count, 2 * features)[..., ::2]  # not next to each other
        wanted = rows.double() @ weight.double().T
        got = library.multiply(rows, found)
        assert got.shape == (1, count, outs)
        within = 1e-6 * (rows.double().abs() @ weight.double().abs().T)
        assert bool(((got.double() - wanted).abs() <= within).all())


def test_a_row_depends_on_no_other_and_other_rows_are_refused(library: KernelLibrary) -> None:
    weight = library.narrow(halves(64, 96))
    assert weight is not None
    rows = torch.randn(8, 96)
    rows[3] = float("nan")
    found = library.multiply(rows, weight)
    assert found[3].isnan().all() and found[:3].isfinite().all() and found[4:].isfinite().all()
    for other, told in ((torch.randn(2, 96).bfloat16(), "float32"), (torch.randn(2, 64), "64 features do not fit")):
        with pytest.raises(ValueError, match=told):
            library.multiply(other, weight)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("outs", "features"), [(1, 1), (33, 7), (300, 384), (577, 1000)])
def test_products_of_panels(library: KernelLibrary, outs: int, features: int, threads: int, bias: bool) -> None:
    weight, added = torch.randn(outs, features), torch.randn(outs)
    panels = library.lay_panels(weight.T.contiguous().T)  # in another order in memory
    torch.set_num_threads(threads)
    for count in (0, 1, 5, 12, 13, 192, 401):
        rows = torch.randn(count, features)
        got = library.multiply_panels(rows, panels, outs, added if bias else None)
        wanted = rows.double() @ weight.double().T + (added.double() if bias else 0)
        assert got.shape == (count, outs)
        assert bool(((got - wanted).abs() <= 1e-5 * (1 + rows.double().abs() @ weight.double().abs().T)).all())
        # A row depends on no other row, and not on how many there are.
        assert torch.equal(got[-1:], library.multiply_panels(rows[-1:], panels, outs, added if bias else None))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("ways", "is_narrow", "copies"),
    [
        ((NARROW, NARROW, PLAIN, PLAIN), True, 1 / 2),
        (always(NARROW), False, 0),  # of other numbers
        ((NARROW, NARROW, PREPACKED, PREPACKED), False, 1),
        ((NARROW, NARROW, PANELS, PANELS), False, 1),
        ((NARROW, NARROW, PANELS, PANELS), True, 3 / 2),
    ],
)
def test_layers_read_the_copy_that_their_rows_are_to_read(
    library: KernelLibrary, bias: bool, ways: tuple[str, ...], is_narrow: bool, copies: float
) -> None:
    layer = torch.nn.Linear(96, 64, bias=bias)
    if is_narrow:
        layer.weight.data = halves(64, 96)
    product = Product(layer, ways, library)
    assert product.nbytes == copies * layer.weight.nbytes
    with torch.inference_mode():
        for count in (1, 8, 64, 512):
            rows = torch.randn(1, count, 96)
            torch.testing.assert_close(product(rows), layer(rows), atol=1e-5, rtol=1e-5)


def test_all_layers_of_a_shape_or_none(library: KernelLibrary) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 32) for _ in range(3)), torch.nn.Linear(64, 96))
    for layer in model:
        layer.weight.data = halves(*layer.weight.shape)
    assert set(narrow_weights(model, library, 1e9)) == set(model)
    assert set(narrow_weights(model, library, 3 * 32 * 64 * 2)) == set(model[:3]), (
        "there is no memory for the other one"
    )
    model[1].weight.data[3, 3] = 0.1
    assert set(narrow_weights(model, library, 1e9)) == {model[3]}
