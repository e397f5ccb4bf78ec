"""Attention on AMX tiles: its loops on any machine, and its instructions, emulated where a processor lacks them."""

from __future__ import annotations

import copy
import ctypes
import itertools
import math
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from chains import chain, single
from models import COMMON, prompt, random_model

from kvr_mpi.logs import SILENT
from kvr_mpi.model import probe_shape
from kvr_mpi.model.cpu_attention import AMX, SOURCES, CpuAttention, KernelLibrary, PrefillAttention, amx_attention
from kvr_mpi.model.kernels import ATTENTION_SLOT, PLAIN, always, forget_kernels, name_ways
from kvr_mpi.prefill.exactness import allowed_error, error_share
from kvr_mpi.prefill.self_check import check_chain
from kvr_mpi.transport.local import LocalTransport
from kvr_mpi.tuning import kernels
from kvr_mpi.tuning.candidates import attention_candidates
from kvr_mpi.tuning.compiled_attention import COMPILERS, find_compiler, run_compiler
from kvr_mpi.tuning.identity import CPUINFO

SOURCE = next(each for each in SOURCES if each.stem == "amx_attention")
EMULATOR = Path(__file__).parents[1] / "programs" / "amx_emulator.cpp"
HAS_AMX = CPUINFO.is_file() and {"amx_tile", "amx_bf16"} <= {*CPUINFO.read_text().split()}


def compile_with(tmp_path_factory: pytest.TempPathFactory, options: str, source: Path = SOURCE) -> ctypes.CDLL:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("there is no C++ compiler")
    file = tmp_path_factory.mktemp("amx") / "library.so"
    if why := run_compiler(f"{find_compiler()} {options}", [source], file):
        pytest.skip(why)
    return ctypes.CDLL(str(file))


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> PrefillAttention:
    found = amx_attention(compile_with(tmp_path_factory, "-DKVR_TILE_LOOPS"))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The same for AMX, with this machine's vector instructions, so that the rest of the arithmetic is the same."""
    if (platform.machine(), sys.platform) != ("x86_64", "linux"):
        pytest.skip("AMX needs Linux on x86-64")
    return compile_with(tmp_path_factory, "-mamx-tile -mamx-bf16")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory, instructions: ctypes.CDLL) -> Any:
    """A context in which a processor without AMX executes its instructions; fails if there were none."""
    emulator = compile_with(tmp_path_factory, "", EMULATOR)

    @contextmanager
    def emulating() -> Iterator[None]:
        emulator.emulator_begin()
        try:
            yield
        finally:
            assert emulator.emulator_end() > 0

    return emulating


def draw(heads: int, kv_heads: int, queries: int, keys: int, dim: int) -> list[torch.Tensor]:
    """Make bfloat16 tensors that lie by token, keys and values side by side as in a cache."""
    torch.manual_seed(queries + keys)
    query = torch.randn(1, queries, heads, dim).transpose(1, 2)
    one, other = torch.randn(1, keys, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)
    return [each.bfloat16() for each in (query, one, other)]


def seen_by(queries: int, keys: int, window: int | None) -> torch.Tensor:
    return torch.ones(queries, keys).tril(keys - queries).triu(keys - queries + 1 - (window or keys)) > 0


def exact(query: Any, keys: Any, values: Any, scale: float, *, causal: bool, window: int | None = None) -> Any:
    """Output and log-sum-exp, in float64."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, dim=1) for each in (keys, values))
    scores = query.double() @ keys.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(~seen_by(query.shape[2], keys.shape[2], window), -math.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


MASKS: tuple[dict[str, Any], ...] = (
    {"causal": False},
    *({"causal": True, "window": window} for window in (None, 1, 40, 130)),
)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [7, 16, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(6, 2), (3, 3)])
def test_it_is_exact_up_to_the_rounding_of_weights(
    loops: PrefillAttention, heads: tuple[int, int], dim: int, threads: int
) -> None:
    """At the edges of its blocks of 32 queries and 64 keys, and of its registers of 16 and 32 numbers."""
    torch.set_num_threads(threads)
    for queries, keys in ((1, 1), (1, 130), (12, 33), (33, 64), (65, 65), (40, 300)):
        tensors = draw(*heads, queries, keys, dim)
        for how in MASKS:
            out, lse = loops.attend(*tensors, dim**-0.5, **how)
            truth = exact(*tensors, dim**-0.5, **how)
            assert out.dtype == lse.dtype == torch.float32
            torch.testing.assert_close(out.double(), truth[0], rtol=8e-3, atol=4e-3)
            torch.testing.assert_close(lse.double(), truth[1], rtol=0, atol=3e-4)


@pytest.mark.parametrize("dim", [64, 128])
def test_its_errors_are_smaller_than_those_of_torch(loops: PrefillAttention, dim: int) -> None:
    query, keys, values = draw(4, 2, 100, 600, dim)
    truth = exact(query, keys, values, dim**-0.5, causal=True)[0]
    both = (each.repeat_interleave(2, 1) for each in (keys, values))
    theirs = torch.nn.functional.scaled_dot_product_attention(query, *both, attn_mask=seen_by(100, 600, None))
    mine = loops.attend(query, keys, values, dim**-0.5, causal=True)[0]
    errors = [float((each - truth).square().mean().sqrt() / truth.std()) for each in (mine, theirs)]
    assert errors[0] < 2e-3 and errors[0] < errors[1]


def test_parts_merge_by_their_log_sum_exps(loops: PrefillAttention) -> None:
    query, keys, values = draw(4, 2, 50, 300, 64)
    whole, _ = exact(query, keys, values, 0.125, causal=True)
    before = loops.attend(query, keys[:, :, :250], values[:, :, :250], 0.125, causal=False)
    own = loops.attend(query, keys[:, :, 250:], values[:, :, 250:], 0.125, causal=True)
    shares = torch.stack([before[1], own[1]]).softmax(0).unsqueeze(-1)
    torch.testing.assert_close((shares[0] * before[0] + shares[1] * own[0]).double(), whole, rtol=8e-3, atol=4e-3)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, -30.0])
def test_large_scores_and_small_ones(loops: PrefillAttention, scale: float) -> None:
    tensors = draw(2, 2, 40, 300, 64)
    found, truth = loops.attend(*tensors, scale, causal=True), exact(*tensors, scale, causal=True)
    torch.testing.assert_close(found[0].double(), truth[0], rtol=8e-3, atol=4e-3)
    torch.testing.assert_close(found[1].double(), truth[1], rtol=1e-5, atol=3e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_not_swallowed(loops: PrefillAttention, bad: float) -> None:
    for which in range(3):
        tensors = draw(2, 1, 40, 200, 64)
        tensors[which][0, 0, 7 if which else 0, 5] = bad
        found, truth = loops.attend(*tensors, 0.2, causal=False)[0], exact(*tensors, 0.2, causal=False)[0]
        assert not truth.isfinite().all()
        torch.testing.assert_close(found.isfinite(), truth.isfinite())


@pytest.mark.parametrize("is_real", [False, True], ids=["emulated", "real"])
def test_instructions_and_loops_agree_to_the_last_bit(
    loops: PrefillAttention, instructions: ctypes.CDLL, request: pytest.FixtureRequest, is_real: bool
) -> None:
    """Also with numbers so small that they count as zero, and whose products do."""
    if is_real and amx_attention(instructions) is None:
        pytest.skip("this processor has no AMX, or the operating system does not permit it")
    running = nullcontext if is_real else request.getfixturevalue("emulated")
    kernel = PrefillAttention(instructions, "kvr_amx_attention")
    for dim, (queries, keys), how in itertools.product((32, 80, 128), ((1, 130), (70, 200)), MASKS[::2]):
        usual = draw(3, 1, queries, keys, dim)
        sizes = (
            torch.logspace(0, power, each.shape[2], 2) for each, power in zip(usual, (-70, -70, -135), strict=True)
        )
        tiny = [each * size.unsqueeze(1) for each, size in zip(usual, sizes, strict=True)]
        for tensors in usual, [each.bfloat16() for each in tiny]:
            assert tensors is usual or tensors[2].float().abs().min() < torch.finfo(torch.float32).tiny
            with running():
                found = kernel.attend(*tensors, dim**-0.5, **how)
            for mine, other in zip(found, loops.attend(*tensors, dim**-0.5, **how), strict=True):
                assert torch.equal(mine.view(torch.int32), other.view(torch.int32))


@pytest.mark.skipif(HAS_AMX, reason="this processor has AMX")
def test_code_for_amx_is_not_used_where_linux_refuses_it(instructions: ctypes.CDLL) -> None:
    assert amx_attention(instructions) is None


def test_it_compiles_for_a_xeon_with_all_registers_in_use(tmp_path: Path) -> None:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("there is no C++ compiler")
    if why := run_compiler(f"{find_compiler()} -march=sapphirerapids -S", [SOURCE], tmp_path / "amx.s"):
        pytest.skip(why)
    code = (tmp_path / "amx.s").read_text()
    assert "tdpbf16ps" in code and all(f"%tmm{number}" in code for number in range(8))


WIDE: dict[str, Any] = COMMON | {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.fixture
def amx_library(library: KernelLibrary, loops: PrefillAttention) -> KernelLibrary:
    """Our kernels as on a processor with AMX."""
    found = copy.copy(library)
    found.amx = loops
    return found


@pytest.mark.parametrize("dim", [32, 24])
def test_chains_with_it_equal_plain_transformers(
    amx_library: KernelLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dim: int
) -> None:
    """Measured to be fastest; with heads that the float32 tiles do not take, too."""
    loaded = random_model(tf.LlamaConfig(**WIDE, head_dim=dim))
    loaded = replace(loaded, model=loaded.model.bfloat16(), dtype=torch.bfloat16)
    loaded = replace(loaded, shape=probe_shape(loaded.model.config, torch.bfloat16))
    truth = single(loaded, prompt(200))
    monkeypatch.setattr(kernels, "_open_attention", lambda *given, **options: amx_library)

    def measure(kinds: Any) -> Any:
        """Take AMX for the fastest, where it is tried."""
        return {
            kind.name: {
                way: [2.0 if way == AMX and kind.tries(way, rows) else 0.5 for rows in kernels.ROWS]
                for way in kind.ways
                if way != PLAIN
            }
            for kind in kinds
        }

    with monkeypatch.context() as patched:
        patched.setattr(kernels, "measure_gains", measure)
        kernels.choose_kernels(loaded, LocalTransport(), 1 << 34, tmp_path, SILENT)
    try:
        with monkeypatch.context() as patched:
            patched.setattr("kvr_mpi.model.kernels.uses_onednn", lambda dtype: dtype == torch.bfloat16)
            assert name_ways(loaded.model) == "AMX tiles and torch for attention, oneDNN for products"
        assert check_chain(loaded)
        assert vars(loaded.model).get(ATTENTION_SLOT) is not None, "the check has not dropped it"
        after = chain(loaded, prompt(200), (0, 101, 200), reserve=12)
        assert error_share(after.logits, truth.logits) <= allowed_error(torch.bfloat16)
    finally:
        forget_kernels(loaded.model)


def test_it_is_measured_where_it_may_be_used(
    library: KernelLibrary, amx_library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = random_model(tf.LlamaConfig(**WIDE, head_dim=32))
    assert [AMX in each.ways for each in attention_candidates(loaded, amx_library)] == [False], "float32"
    loaded = replace(loaded, dtype=torch.bfloat16)
    assert [AMX in each.ways for each in attention_candidates(loaded, library)] == [library.amx is not None]
    (kind,) = attention_candidates(loaded, amx_library)
    monkeypatch.setattr("kvr_mpi.tuning.candidates.TURNS_BYTES", 0)
    monkeypatch.setattr(kernels, "MOST_CALL_S", math.inf)
    monkeypatch.setattr(kernels, "ROWS", (1, 8))
    gains = kernels.measure_gains([kind])[kind.name][AMX]
    assert gains[0] == 1.0 and gains[1] > 0.0, "one row is for the decode kernel; the results of more are right"
    kernel = CpuAttention(amx_library, (PLAIN, AMX, AMX, AMX))
    tensors = draw(4, 2, 8, 50, 24)
    assert kernel.takes(*tensors) and not kernel.takes(*(each.float() for each in tensors))
    assert not kernel.takes(*(each.half() for each in tensors))
    assert not CpuAttention(library, always(AMX)).takes(*tensors) or library.amx is not None
