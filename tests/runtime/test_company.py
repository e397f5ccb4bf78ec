"""An answer depends on its document alone: not on the others, their order, the ranks, or what was answered before.

That holds in float32 on CPUs; elsewhere records name what the answer was computed with.
"""

from __future__ import annotations

import functools
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


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory, small_vocabulary_dir: Path) -> Callable[..., kvr_mpi.Results]:
    """Answer some documents, of which an earlier run over other ranks (`before`) has answered the first."""
    folder, numbers = tmp_path_factory.mktemp("company"), itertools.count()

    def answers(
        names: list[str], ranks: int, *more: str, before: tuple[int, int] = (0, 1), dtype: str = "float32"
    ) -> kvr_mpi.Results:
        number = next(numbers)
        corpus, output = folder / f"{number}.jsonl", folder / f"out-{number}"
        job: dict[str, Any] = {
            "model": {"path": str(small_vocabulary_dir), "dtype": dtype},
            "documents": {"path": str(corpus)},
            "prompt": {"template": "Sum up: {text}"},
            "generation": {"max_new_tokens": 8},
            "parallel": {"partition": "even"},
            "output": {"path": str(output)},
        }
        for count, size in (before, (len(names), ranks)):
            corpus.write_text("".join(json.dumps({"id": name, "text": TEXTS[name]}) + "\n" for name in names[:count]))
            run = functools.partial(kvr_mpi.run, job, settings=more, extend=output.exists())
            ended = run_local(size, lambda world: run(comm=world)) if count else []  # noqa: B023
            assert all(one.exit_code == 0 for one in ended)
        return kvr_mpi.open_results(output)

    return answers


@pytest.fixture(scope="module")
def alone(answer: Callable[..., kvr_mpi.Results]) -> Callable[..., tuple[int, ...]]:
    """Give the answer of a document that is the only one of its job, on one rank."""
    return functools.cache(lambda name, *sampling: answer([name], 1, *sampling)[name].token_ids)


@settings(max_examples=6)
@given(
    names=st.lists(st.sampled_from(sorted(TEXTS)), min_size=2, unique=True),
    ranks=st.integers(1, 3),
    before=st.tuples(st.integers(0, 4), st.integers(1, 2)),
    sampling=st.sampled_from([(), ("generation.temperature=1.3",)]),
    strategy=st.sampled_from(["kvr", "ring"]),
)
def test_answers_do_not_depend_on_company(
    names: list[str], ranks: int, before: Any, sampling: tuple[str, ...], strategy: str, answer: Any, alone: Any
) -> None:
    before = (min(before[0], len(names) - 1), before[1])
    found = answer(names, ranks, *sampling, f"parallel.strategy={strategy}", before=before)
    assert {one.id: one.token_ids for one in found} == {name: alone(name, *sampling) for name in names}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_records_name_kernels_on_which_an_answer_may_depend(answer: Any, dtype: str) -> None:
    found = answer(["doc-3", "doc-6"], 2, "prompt.too_long=split", "prompt.max_tokens=200", dtype=dtype)
    (kernels,) = {record.kernels for record in found}
    expected = f"CPU {torch.backends.cpu.get_cpu_capability()}, bfloat16; attention: " if dtype == "bfloat16" else ""
    assert kernels.startswith(expected) and ("products: " in kernels) == bool(kernels) == bool(expected)
