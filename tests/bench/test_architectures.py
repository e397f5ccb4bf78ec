"""Every architecture is exact or refused: a sample of the catalogue; `long` tests run jobs of all of it."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
from constants import ROOT

from benchmarks import exactness
from benchmarks.architectures import (
    BAD,
    REFUSED,
    WRONG,
    Verdict,
    catalogue,
)
from benchmarks.architectures import judge as judge_entry
from benchmarks.catalogue_table import BEGIN, END
from kvr_mpi.prefill.one_prompt import prefill_kvr

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "how-it-works.md"
# Two of plain attention, and mechanisms that `models.py` has none of; `prefill/test_chain.py` compares its kinds.
EXACT = {
    "mistral": "a window in every layer, grouped heads",
    "opt padding in the prompt": "positions made from a mask",
    "phi3 longrope above": "rotary frequencies by the length of the prompt",
    "phimoe window": "a window by the mask alone",
    "gemma3n_text": "layers that share keys",
    "nemotron_h": "states that its own code for a single token leaves a little different",
    "roberta": "positions that begin after the padding id",
}
NOT_A_CHAIN = {
    "bert as an encoder": "sees the tokens to come",
    "minimax": "its own cache",
    "roberta padding in the prompt": "positions that skip padding",
    "mamba": "plain transformers does not go on with several tokens",
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory, warm_start: list[str]) -> dict[str, Verdict]:
    """What the command says of the sample."""
    lines = tmp_path_factory.mktemp("architectures") / "lines.jsonl"
    names = ",".join([*EXACT, *NOT_A_CHAIN])
    command = [*warm_start, "-m", "benchmarks", "architectures", "--only", names, "--json", str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = [Verdict.from_json(line) for line in lines.read_text().splitlines()]
    assert done.returncode == int(any(verdict.kind in BAD for verdict in found)), done.stderr
    assert f"of {len(EXACT) + len(NOT_A_CHAIN)}: " in done.stdout
    return {verdict.name: verdict for verdict in found}


def test_every_mechanism_is_exact_and_what_cannot_be_a_chain_is_refused_by_name(verdicts: dict[str, Verdict]) -> None:
    for number, name in enumerate(EXACT):
        verdict = verdicts[name]
        assert verdict.kind.startswith("exact"), (name, verdict.kind, verdict.reason)
        assert sum("chain" in strategy for strategy in verdict.exact) == 5, name
        # Plain attention takes several documents in a row.
        assert number >= 2 or {"packed", "prefix", "packed prefix"} <= set(verdict.exact), (name, verdict.refused)
    for name in NOT_A_CHAIN:
        verdict = verdicts[name]
        assert verdict.kind == REFUSED and verdict.architecture in verdict.reason, (name, verdict.reason)


def change_the_first_token(loaded: Any, ids: Any, cut: Any, rank: Any, **options: Any) -> Any:
    """Of chains; other strategies are right."""
    return prefill_kvr(loaded, [ids[0] + 1, *ids[1:]], cut, rank, **options)


def test_a_wrong_answer_past_the_self_check_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "prefill_kvr", change_the_first_token)
    verdict = judge_entry(catalogue()["llama gqa"])
    assert verdict.kind == WRONG
    assert "chain 0-53-90: the logits by" in verdict.reason
    assert "ring 2" in verdict.exact


def test_the_table_in_docs_has_every_entry() -> None:
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].replace("\n  ", " ")
    rows = re.findall(r"^- \*\*(.*?): .*?\*\*: (.*)$", text, re.MULTILINE)
    counted = sum(int(names.removesuffix(" of them")) for _, names in rows if names.endswith(" of them"))
    named = [name for _, names in rows if not names.endswith(" of them") for name in names.split(", ")]
    assert set(named) <= set(catalogue()) and len(set(named)) + counted == len(named) + counted == len(catalogue())
    assert {name for name, entry in catalogue().items() if not entry.is_variant} <= set(named)
    assert not {kind for kind, _ in rows} & set(BAD)
