"""Several answers, log-probabilities, scores and schemas, by every group of ranks that can answer prompts together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import prompt
from rows import alone, batch_of, count_down, finish, ready, run_out_at, spread
from torch.overrides import TorchFunctionMode

from kvr_mpi.decode.group import BatchEntry, Group
from kvr_mpi.decode.token_parallel import TokenGroup
from kvr_mpi.documents.document import OwnGeneration
from kvr_mpi.errors import AgreementError
from kvr_mpi.fairkv.group import HeadGroup
from kvr_mpi.fairkv.placement import place_in_proportion
from kvr_mpi.kv.chain import layer_kv
from kvr_mpi.model import LoadedModel
from kvr_mpi.transport import Transport
from kvr_mpi.transport.local import run_local

NEW_TOKENS = 7
LENGTHS = (34, 51, 20)
TEXTS = ("7 8 9 10 11", "5", "190 3 4 5 6 7")
SAMPLED = {"do_sample": True, "temperature": 1.2, "top_k": 40}
Answers = dict[int, BatchEntry]


@dataclass
class Asking:
    """What is asked of a group: prompts with settings of their own."""

    own: Sequence[OwnGeneration]
    config: dict[str, Any]

    def __call__(self, name: str, loaded: LoadedModel, size: int) -> Answers:
        return self.of_all(run_local(1 if name == "alone" else size, lambda chain: self.answer(name, loaded, chain)))

    def of_all(self, ranks: Sequence[Answers]) -> Answers:
        found = {key: one for rank in ranks for key, one in rank.items()}
        assert len(found) == sum(map(len, ranks)) == len(self.own), "each prompt is handed out once"
        return found

    def answer(
        self, name: str, loaded: LoadedModel, chain: Transport, prefilled: Callable[[], object] = lambda: None
    ) -> Answers:
        """Answer on a rank, after a call when all prompts are prefilled."""
        torch.set_num_threads(1)
        groups: dict[str, Callable[[], Group]] = {
            "alone": lambda: Group(loaded),
            "heads": lambda: HeadGroup(loaded, chain, place_in_proportion),
            "tokens": lambda: TokenGroup(loaded, chain),
        }
        batch = batch_of(loaded, NEW_TOKENS, groups[name](), **self.config)
        found: Answers = {}
        for number, own in enumerate(self.own):
            home, ids = number % chain.size, prompt(LENGTHS[number % len(LENGTHS)])
            if name == "tokens" or chain.rank == home:
                prefill = spread(loaded, ids, chain, home) if name == "tokens" else alone(loaded, ids, NEW_TOKENS)
                batch.add(number, prefill, ids, 100 + number, own)
                found |= {one.key: one for one in batch.take_finished()}
        prefilled()
        return found | finish(batch)


def written(found: Answers) -> dict[int, list[tuple[int, ...]]]:
    answers = {key: one.answer for key, one in found.items()}
    return {key: [each.token_ids for each in (a.samples or (a,))] for key, a in answers.items() if a is not None}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["heads", "tokens"])
def test_several_answers_are_those_of_a_rank_alone(name: str, size: int) -> None:
    """Some prompts have one answer, others several, which end at different times; each begins where the prompt ends."""
    loaded, counts = ready("llama-gqa"), (3, 1, 2, 4, 1)
    ask = Asking([OwnGeneration(n=count) for count in counts], {**SAMPLED, "eos_token_id": list(range(0, 190, 7))})
    truths = written(ask("alone", loaded, 1))
    assert tuple(len(truths[number]) for number in range(5)) == counts
    assert max(len(set(answers)) for answers in truths.values()) > 2, "each has random numbers of its own"
    assert len({len(ids) for answers in truths.values() for ids in answers}) > 1
    assert written(ask(name, loaded, size)) == truths


@pytest.mark.parametrize(
    ("name", "model"),
    [("heads", "llama-gqa"), ("tokens", "llama-gqa"), ("tokens", "mistral-window"), ("tokens", "gemma2-softcap")],
)
def test_scores_and_log_probabilities_are_those_of_a_rank_alone(name: str, model: str) -> None:
    """Scores come before the answer, which goes on as if nothing had been scored."""
    loaded = ready(model)
    own = [OwnGeneration(score=TEXTS, top_logprobs=3), OwnGeneration(), OwnGeneration(score=TEXTS[:1], top_logprobs=2)]
    ask = Asking([*own, OwnGeneration(score=("",))], {})
    truths, found = ask("alone", loaded, 1), ask(name, loaded, 3)
    assert written(found) == written(truths) == written(Asking([OwnGeneration()] * 3, {})("alone", loaded, 1))
    assert found[3].answer is None and "has no tokens" in str(found[3].error), "an error of one prompt"
    if (shard := found[1].prefill.cache).longest is not None:  # what is stored has the answer, too, but its last token
        held = layer_kv(shard, 0)
        assert held is not None and len(held[0]) == shard.stop - shard.start + NEW_TOKENS - 1
    for key, scored in ((0, 3), (1, 0), (2, 1)):
        mine, theirs = found[key].answer, truths[key].answer
        assert mine is not None and theirs is not None and len(mine.scores) == len(theirs.scores) == scored
        for one, other in zip(mine.scores, theirs.scores, strict=True):
            assert (one.text, one.is_greedy) == (other.text, other.is_greedy)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert (mine.logprobs is None) == (theirs.logprobs is None) == (key == 1)
        if mine.logprobs is not None and theirs.logprobs is not None:
            assert mine.logprobs.logprobs == pytest.approx(theirs.logprobs.logprobs, abs=1e-4)
            assert mine.logprobs.top_tokens == theirs.logprobs.top_tokens


@pytest.mark.parametrize(
    ("name", "model", "documents"),
    [
        ("heads", "llama-gqa", 1),
        ("heads", "llama-gqa", 4),
        ("tokens", "llama-gqa", 1),
        ("tokens", "llama-gqa", 4),
        pytest.param("tokens", "mistral-window", 4, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("place", ["layers.0", "layers.1.self_attn.o_proj", "layers.1.mlp", "norm", "lm_head"])
def test_ranks_go_on_when_memory_runs_out_on_one(place: str, name: str, model: str, documents: int) -> None:
    """In halves, with the same answers; a prompt alone, whose tokens they divide, is an error that says which rank."""
    loaded, left = ready(model), {1: 1, 2: 2}  # times that a rank fails
    ask = Asking([OwnGeneration()] * documents, {})
    truths = written(ask("alone", loaded, 1))
    hook, run = run_out_at(loaded, place, count_down(left))

    def work(chain: Transport) -> Answers:
        return ask.answer(name, loaded, chain, lambda: setattr(run, "rank", chain.rank))

    found = ask.of_all(run_local(3, work))
    hook.remove()
    if documents == 1:
        assert "rank 1, 2 of its chain ran out of memory" in str(found[0].error) and found[0].answer is None
        assert found[0].prefill.cache is None
    else:
        assert written(found) == truths and all(count < 0 for count in left.values())


class RunOut(TorchFunctionMode):
    """Let this thread's memory run out once, when ranks' log-sum-exps are merged for the `due`-th time."""

    def __init__(self, due: int) -> None:
        super().__init__()
        self.left = due

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= func is torch.Tensor.logsumexp
        if func is torch.Tensor.logsumexp and not self.left:
            raise torch.OutOfMemoryError("CUDA out of memory (on purpose)")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("due", [1, 2, 3, 5])
def test_ranks_that_have_met_do_not_meet_again_when_memory_for_what_they_found_runs_out(due: int) -> None:
    """In the merge of one layer, on one rank: its prompt is an error on all, and the next ones are answered."""
    loaded = ready("llama-gqa")
    truths = written(Asking([OwnGeneration()] * 2, {})("alone", loaded, 1))

    def work(chain: Transport) -> Answers:
        torch.set_num_threads(1)
        batch = batch_of(loaded, NEW_TOKENS, HeadGroup(loaded, chain, place_in_proportion))
        found: Answers = {}
        with RunOut(due if chain.rank == 1 else 0):
            for wave in ((0,), (1,), (0, 1)):  # those by themselves are divided by tokens
                for number in wave if chain.rank == 0 else ():
                    ids = prompt(LENGTHS[number])
                    batch.add(number, alone(loaded, ids, NEW_TOKENS), ids, 100 + number)
                answered = finish(batch)
                if wave == (0,):
                    assert all("rank 1 of its chain ran out of memory" in str(one.error) for one in answered.values())
                found |= answered
        return found

    first, second = run_local(2, work)
    assert written(first) == truths and not second


def test_ranks_that_would_run_different_tokens_end_the_job() -> None:
    loaded = ready("llama-gqa")

    @torch.inference_mode()
    def work(chain: Transport) -> str:
        group = TokenGroup(loaded, chain)
        prefill = spread(loaded, prompt(30), chain, 1)
        with pytest.raises(
            AgreementError, match="have run different tokens of prompts that are spread over them"
        ) as bad:
            group.look_ahead(prefill, [5, 6 + chain.rank])
        return str(bad.value)

    assert len(run_local(2, work)) == 2
