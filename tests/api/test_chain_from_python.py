"""A prompt on ranks of the caller's own: the answer of one process, and whatever ranks disagree on refused on all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import NEW_TOKENS
from transformers import AutoModelForCausalLM

from kvr_mpi import Chain, ChainPrefill
from kvr_mpi.decode.sampling import Answer
from kvr_mpi.errors import ConfigError, DocumentError, KvrError
from kvr_mpi.transport.local import LocalTransport, run_local

TEXT = "The ferry left at seven and the harbour was quiet. Nobody on the pier had seen the second boat. " * 12
EVEN = {"partition": "even"}


@pytest.fixture(scope="module")
def truth(tiny_model_dir: Path, small_tokenizer: Any) -> tuple[torch.Tensor, list[int]]:
    """Logits after the text, and greedy tokens, of plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    ids = torch.tensor([small_tokenizer(TEXT).input_ids])
    with torch.inference_mode():
        logits = model(ids).logits[0, -1]
        tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))
    return logits, tokens[0, ids.shape[1] :].tolist()


def on_ranks(size: int, model: Path, work: Callable[[Chain], Any], **settings: Any) -> list[Any]:
    """Do something with a chain of threads; what a rank raises in `work` is its result."""

    def rank(world: LocalTransport) -> Any:
        given = {"generation": {"max_new_tokens": NEW_TOKENS}, "parallel": EVEN, **settings}
        with Chain({"path": str(model), "dtype": "float32"}, world, **given) as chain:
            try:
                return work(chain)
            except KvrError as error:
                return error

    return run_local(size, rank)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_it_answers_as_one_process_does(size: int, tiny_model_dir: Path, truth: Any) -> None:
    def work(chain: Chain) -> tuple[ChainPrefill, Answer, Answer]:
        assert chain.rank < chain.size == size and chain.decode_rank == size - 1
        prefill = chain.prefill(TEXT if chain.rank == 0 else None)
        return prefill, chain.generate(prefill), chain.generate(chain.encode(TEXT))

    found = on_ranks(size, tiny_model_dir, work)
    logits, tokens = truth
    for rank, (prefill, answer, again) in enumerate(found):
        assert (prefill.logits is not None) == (rank == size - 1) and len(prefill.bounds) == size + 1
        assert list(answer.token_ids) == list(again.token_ids) == tokens[: len(answer.token_ids)]
        assert len(answer.token_ids) == NEW_TOKENS or answer.finish_reason == "stop"
        assert answer.text == found[0][1].text != ""
    assert torch.allclose(found[-1][0].logits, logits, atol=1e-4 * float(logits.max() - logits.min()))


def test_ranks_that_differ_in_prompt_or_method_are_refused_on_all(tiny_model_dir: Path) -> None:
    def work(chain: Chain) -> Answer:
        with pytest.raises(KvrError, match="rank 1 received a different prompt than rank 0|another rank failed"):
            chain.prefill(f"{TEXT} {chain.rank}")
        with pytest.raises(KvrError, match="rank 0 received no prompt|another rank failed"):
            chain.prefill(TEXT if chain.rank else None)
        with pytest.raises(KvrError, match="method called is 'generate' on rank 1 and 'prefill'|another rank failed"):
            chain.generate(TEXT) if chain.rank else chain.prefill(TEXT)
        return chain.generate(TEXT)  # and goes on

    first, second = on_ranks(2, tiny_model_dir, work)
    assert first.token_ids == second.token_ids


def test_what_cannot_be_run_is_refused_and_the_chain_goes_on(tiny_model_dir: Path) -> None:
    def work(chain: Chain) -> None:
        for prompt, why in (
            ([], r"has 0 tokens; expected 1 to 480"),
            ([5] * 481, r"has 481 tokens; expected 1 to 480"),
            ("", "no tokens for ''"),
            ([5, 10**7], "10000000"),
        ):
            with pytest.raises(DocumentError, match=why):
                chain.prefill(prompt)
        prefill = chain.prefill(TEXT)
        chain.generate(prefill)
        chain.generate(prefill)

    (error,) = on_ranks(1, tiny_model_dir, work)
    assert isinstance(error, ConfigError) and "has already been continued" in str(error)
    (error,) = on_ranks(1, tiny_model_dir, lambda chain: chain.generate(TEXT), generation={"max_new_tokens": 0})
    assert isinstance(error, ConfigError) and "can only prefill" in str(error)


def test_settings_that_make_no_chain_are_refused(tiny_model_dir: Path) -> None:
    for parallel, why in [
        ({"strategy": "single"}, "a Chain always uses all ranks of its communicator"),
        ({"ranks_per_chain": 1}, "a Chain always uses all ranks of its communicator"),
        ({"partition": "evne"}, "parallel.partition"),
    ]:
        with pytest.raises(ConfigError, match=why):
            Chain(str(tiny_model_dir), LocalTransport(), parallel=parallel)

    def rank(world: LocalTransport) -> str:
        with pytest.raises(KvrError) as caught:
            Chain(str(tiny_model_dir), world, generation={"max_new_tokens": 4 + world.rank}, parallel=EVEN)
        return str(caught.value)

    told = "setting generation.max_new_tokens is '5' on rank 1 and '4' on rank 0; expected the same on all ranks: "
    assert run_local(2, rank)[0].startswith(told)
