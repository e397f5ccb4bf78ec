"""An answer depends on its document alone: not on the others, their order, the ranks, or what was answered before.

That holds in float32 on CPUs; elsewhere records name what the answer was computed with.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvr_mpi
from kvr_mpi.transport.local import run_local

TEXTS = {
    f"doc-{number}": f"Document {number}: the ferry left at {number} and came back. " * repeats
    for number, repeats in enumerate((1, 2, 3, 9, 14, 22, 25))
}
Answers = dict[str, list[int]]


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory, small_vocabulary_dir: Path) -> Callable[..., Answers]:
    """Give answers of some documents; `before`: those that an earlier run over other ranks has answered."""
    folder, numbers = tmp_path_factory.mktemp("company"), itertools.count()

    def answers(
        names: list[str], ranks: int, *settings: str, before: tuple[int, int] = (0, 1), to: Path | None = None
    ) -> Answers:
        number = next(numbers)
        corpus, output = folder / f"{number}.jsonl", to or folder / f"out-{number}"
        job: dict[str, Any] = {
            "model": {"path": str(small_vocabulary_dir), "dtype": "float32"},
            "documents": {"path": str(corpus)},
            "prompt": {"template": "Sum up: {text}"},
            "generation": {"max_new_tokens": 8},
            "parallel": {"partition": "even"},
            "output": {"path": str(output)},
        }

        def run(some: list[str], size: int, *, extend: bool) -> None:
            corpus.write_text("".join(json.dumps({"id": name, "text": TEXTS[name]}) + "\n" for name in some))
            ended = run_local(size, lambda world: kvr_mpi.run(job, settings=settings, comm=world, extend=extend))
            assert {one.exit_code for one in ended} == {0}

        count, size = before
        if count:
            run(names[:count], size, extend=False)
        run(names, ranks, extend=bool(count))
        return {record.id: list(record.token_ids or ()) for record in kvr_mpi.open_results(output)}

    return answers


@pytest.fixture(scope="module")
def alone(answer: Callable[..., Answers]) -> Callable[[str, tuple[str, ...]], list[int]]:
    """Give the answer of a document that is the only one of its job, on one rank."""
    known: dict[tuple[str, tuple[str, ...]], list[int]] = {}

    def answer_of(name: str, sampling: tuple[str, ...]) -> list[int]:
        if (name, sampling) not in known:
            known[name, sampling] = answer([name], 1, *sampling)[name]
        return known[name, sampling]

    return answer_of


@settings(max_examples=6)
@given(
    names=st.lists(st.sampled_from(sorted(TEXTS)), min_size=2, unique=True),
    ranks=st.integers(1, 3),
    before=st.tuples(st.integers(0, 4), st.integers(1, 2)),
    sampling=st.sampled_from([(), ("generation.temperature=1.3",)]),
    strategy=st.sampled_from(["kvr", "ring"]),
)
def test_answers_do_not_depend_on_company(
    names: list[str],
    ranks: int,
    before: tuple[int, int],
    sampling: tuple[str, ...],
    strategy: str,
    answer: Callable[..., Answers],
    alone: Callable[[str, tuple[str, ...]], list[int]],
) -> None:
    before = (min(before[0], len(names) - 1), before[1])
    found = answer(names, ranks, *sampling, f"parallel.strategy={strategy}", before=before)
    assert found == {name: alone(name, sampling) for name in names}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_records_name_kernels_on_which_an_answer_may_depend(
    answer: Callable[..., Answers], tmp_path: Path, dtype: str
) -> None:
    output = tmp_path / "out"
    split = ("prompt.too_long=split", "prompt.max_tokens=200")
    answer(["doc-3", "doc-6"], 2, f"model.dtype={dtype}", *split, to=output)
    named = {record.kernels for record in kvr_mpi.open_results(output)}
    if dtype == "float32":
        assert named == {""}
        return
    (kernels,) = named
    assert kernels.startswith(f"CPU {torch.backends.cpu.get_cpu_capability()}, bfloat16; attention: ")
    assert "products: " in kernels
