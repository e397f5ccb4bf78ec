"""Keys and values in 8 bits: how far off they are, that it is said, and that nothing else passes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from made_runs import HEADER, record

from kvr_mpi.errors import DataError
from kvr_mpi.kv.contents import layer_kv
from kvr_mpi.model.attention_hook import prepare_model, run_model
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.store.arrays import EightBit, join, quantise, restore
from kvr_mpi.store.hdf5 import create_hdf5
from kvr_mpi.store.kv import open_kv
from kvr_mpi.store.outputs import check_record, open_file, start_file, write_record
from kvr_mpi.store.stored_kv import CachedTokens, StoredKV
from kvr_mpi.transport.local import LocalTransport

TOKENS = 600


def random(seed: int, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, 2, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with one document, stored in 8 bits."""
    with create_hdf5(tmp_path / "shard-a.h5") as file:
        start_file(file, HEADER)
        layers = [(quantise(random(0)), quantise(random(1))), None, (quantise(random(2)), quantise(random(3)))]
        write_record(file, record("a"), layers, CachedTokens(range(TOKENS), (1, 3)))
    return tmp_path / "shard-a.h5"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_is_off_by_more_than_half_a_step(dtype: torch.dtype) -> None:
    exact = random(0, dtype=dtype)
    exact[5] = 0
    rounded = quantise(exact)
    back = restore(rounded.codes, rounded.scales, rounded.dtype)
    assert back.dtype == dtype and bool((back[5] == 0).all())
    half = exact.float().abs().amax(-1, keepdim=True) / 127 / 2
    noise = torch.finfo(dtype).eps * exact.float().abs()
    assert bool(((back.float() - exact.float()).abs() <= 1.01 * half + noise).all())
    off = (back.double() - exact.double()).square().sum() / exact.double().square().sum()
    assert rounded.error == pytest.approx(float(off.sqrt()), rel=0.2) and 0 < rounded.error < 0.02


def read(path: Path) -> StoredKV:
    with open_file(path) as file:
        group = file["documents/a"]
        check_record(group)
        return open_kv(group)


def test_what_is_read_is_what_was_rounded(path: Path) -> None:
    """A quarter of the size, any range of tokens, and the error is in the file."""
    with open_file(path) as file:
        stored = open_kv(file["documents/a"])
        assert stored.bytes == 2 * 2 * TOKENS * 2 * (16 + 4) and [layer.number for layer in stored.layers] == [0, 2]
        rounded = quantise(random(1))
        whole = restore(rounded.codes, rounded.scales, rounded.dtype)
        for first, last in ((0, TOKENS), (0, 1), (255, 257), (300, 600), (7, 7)):
            torch.testing.assert_close(stored.layers[0].read(first, last)[1], whole[first:last], rtol=0, atol=0)
        assert stored.layers[0].values.error == rounded.error and stored.layers[0].keys.type_name == "float32"
        keys, _ = stored.layers[1].contents()
        assert isinstance(keys, EightBit) and torch.equal(keys.codes, quantise(random(2)).codes)


def test_parts_are_joined_as_they_are() -> None:
    """What was rounded once is not rounded again."""
    parts = [quantise(random(0, 7)), quantise(random(1, 3))]
    whole = join(parts)
    assert isinstance(whole, EightBit) and whole.error == max(part.error for part in parts)
    assert torch.equal(whole.codes[7:], parts[1].codes) and torch.equal(whole.scales[:7], parts[0].scales)
    exact = join([parts[0], random(1, 3)])
    assert isinstance(exact, torch.Tensor) and torch.equal(exact[7:], random(1, 3))


def change(path: Path, name: str, change: Any) -> None:
    with h5py.File(path, "r+") as file:
        change(file[f"documents/a/kv/layer_002/{name}"])


def flip(dataset: Any) -> None:
    dataset[300, 1] += 1


def say_half(dataset: Any) -> None:
    dataset.attrs.modify("dtype", b"float16")


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("keys", flip),
        ("keys_scales", flip),
        ("values_scales", flip),
        ("values", say_half),
        ("keys", lambda dataset: dataset.attrs.modify("dtype", b"int64")),
        ("keys", lambda dataset: dataset.attrs.modify("error", 0.0)),
        ("keys", lambda dataset: dataset.parent.move("keys_scales", "scales")),
        ("keys_scales", lambda dataset: dataset.parent.__setitem__("digests2", [1])),
    ],
)
def test_nothing_else_passes_for_it(path: Path, name: str, how: Any) -> None:
    read(path)
    change(path, name, how)
    with pytest.raises(DataError):
        read(path)


@pytest.mark.long
def test_a_real_text_goes_on_as_likely(smollm: Any) -> None:
    """Negative log-likelihood of what follows 1,500 tokens, within half a percent of the exact cache's."""
    loaded = smollm
    prepare_model(loaded.model, chain=True)
    text = Path("jobs/demo/expedition-log.md").read_text()
    ids = loaded.tokenizer(text)["input_ids"][:1900]
    known = 1500

    @torch.inference_mode()
    def nll(rounds: bool) -> float:
        done = prefill_kvr(loaded, ids[:known], Partition((0, known)), LocalTransport(), reserve_tokens=400)
        for number, layer in enumerate(done.cache.layers):
            if rounds:
                kv = layer_kv(done.cache, number)
                assert kv is not None
                back = (quantise(each) for each in kv)
                keys, values = (restore(one.codes, one.scales, one.dtype).transpose(0, 1).unsqueeze(0) for one in back)
                layer.layout.write(0, keys, values)
        logits = run_model(loaded.model, torch.tensor([ids[known:]]), done.cache, keep=torch.arange(400))
        return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[known + 1 :])))

    exact, rounded = nll(False), nll(True)
    print(exact, rounded, rounded / exact - 1)
    assert abs(rounded / exact - 1) < 0.005
