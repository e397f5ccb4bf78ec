"""Full chunks by compiled code: with a real compiler, and where there is none, or it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chains import greedy, single
from models import prompt, tiny

from kvr_mpi.model import LoadedModel
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.layer_chunks import decoder_layers
from kvr_mpi.model.layer_pieces import LayerPieces, forget_pieces, pieces_of
from kvr_mpi.partition import Partition
from kvr_mpi.prefill.one_prompt import prefill_kvr
from kvr_mpi.transport.local import LocalTransport, run_local
from kvr_mpi.tuning import compiled
from kvr_mpi.tuning.compiled import FAILED
from kvr_mpi.tuning.compiled_layers import compile_layers

CHUNK = 16
KINDS = {"llama-gqa": 1, "gemma2-softcap": 2, "qwen2-some-windows": 2, "gpt2": 1}
EXPERTS = ("mixtral-moe", "llama4-chunks", "gpt-oss-sinks")
NAMES = (*KINDS, *EXPERTS, "falcon-mqa")

pytestmark = pytest.mark.skipif(compiled._LOADER is None, reason="this torch loads no compiled packages")


@pytest.fixture(autouse=True)
def own_code_again() -> Iterator[None]:
    """Models are made once for all tests: leave none with pieces."""
    yield
    for name in NAMES:
        forget_pieces(tiny(name).model)


def compile_for(loaded: LoadedModel, cache: Path) -> tuple[bool, list[str]]:
    said: list[str] = []
    prepare_model(loaded.model, chain=True)
    return compile_layers(loaded, CHUNK, LocalTransport(), cache, said.append), said


def pieces_in(loaded: LoadedModel) -> list[LayerPieces]:
    return [found for layer in decoder_layers(loaded.model) if (found := pieces_of(layer)) is not None]


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_one_code_serves_all_layers_of_a_kind_and_documents_of_any_length(name: str, tmp_path: Path) -> None:
    """Compiled for real: the same logits and tokens on 1 and 2 ranks, two files for each kind and never another."""
    loaded = tiny(name)
    answers = {}
    for tokens in (40, 90, 33):
        truth = single(loaded, prompt(tokens))
        assert truth.logits is not None
        answers[tokens] = truth.logits, greedy(loaded.model, truth, 8)
    done, said = compile_for(loaded, tmp_path)
    assert done, said
    assert "computed by compiled code in 2 of 3 layers" in said[-1] and "compiling" in said[0] and len(said) == 2
    (folder,) = (tmp_path / "kernels").iterdir()
    files = sorted(file.name for file in folder.iterdir())
    assert len([file for file in files if file.endswith(".pt2")]) == 2 * KINDS[name]
    for tokens, (logits, answer) in answers.items():
        for bounds in ((0, tokens), (0, tokens // 2 + 3, tokens)):
            partition = Partition(bounds)
            before = sum(each.runs for each in pieces_in(loaded))
            found = run_local(
                partition.size,
                lambda rank: prefill_kvr(
                    loaded,
                    prompt(tokens),  # noqa: B023
                    partition,  # noqa: B023
                    rank,
                    reserve_tokens=8,
                    chunk_tokens=CHUNK,
                ),
            )[-1]
            assert found.logits is not None and torch.allclose(found.logits, logits, atol=1e-4)
            assert greedy(loaded.model, found, 8) == answer
            assert sum(each.runs for each in pieces_in(loaded)) > before
    assert sorted(file.name for file in folder.iterdir()) == files
    again, said = compile_for(loaded, tmp_path)  # as a later job does
    assert again and len(said) == 1
    assert sorted(file.name for file in folder.iterdir()) == files


@pytest.mark.slow
def test_without_a_compiler_the_layers_own_code_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
    monkeypatch.delenv("CXX", raising=False)
    loaded = tiny("llama-gqa")
    done, said = compile_for(loaded, tmp_path / "cache")
    assert not done and pieces_in(loaded) == []
    assert "compiling layers for chunks of 16 tokens" in said[0] and "the compiler failed" in said[1]
    assert "layers' own code on 1 of 1 rank(s): there is no compiled code for them" in said[2]
    (folder,) = (tmp_path / "cache" / "kernels").iterdir()
    assert [each.name for each in folder.iterdir()] == [FAILED]
    found = prefill_kvr(loaded, prompt(40), Partition((0, 40)), LocalTransport(), chunk_tokens=CHUNK).logits
    truth = single(loaded, prompt(40)).logits
    assert found is not None and truth is not None and torch.allclose(found, truth, atol=1e-4)


def test_a_model_that_is_not_cut_is_named(tmp_path: Path) -> None:
    loaded = tiny("falcon-mqa")
    done, said = compile_for(loaded, tmp_path)
    assert not done and pieces_in(loaded) == [] and "FalconForCausalLM calls its attention itself" in said[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.filterwarnings("ignore")
def test_code_that_depends_on_what_tokens_say_is_compiled_right_or_not_at_all(name: str, tmp_path: Path) -> None:
    """Which experts a token goes to is known when it is there."""
    loaded = tiny(name)
    truth = single(loaded, prompt(70)).logits
    done, said = compile_for(loaded, tmp_path)
    assert done == bool(pieces_in(loaded)) and (done or "layers' own code" in said[-1])
    found = prefill_kvr(loaded, prompt(70), Partition((0, 70)), LocalTransport(), chunk_tokens=CHUNK).logits
    assert found is not None and truth is not None and torch.allclose(found, truth, atol=1e-4)
