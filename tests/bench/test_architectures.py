"""Every architecture is exact or refused: a sample of the catalogue, one of each mechanism; all of it behind `long`."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from constants import ROOT

from benchmarks import exactness, survey
from benchmarks.architectures import (
    BAD,
    NOT_HERE,
    REFUSED,
    TRACEBACK,
    WRONG,
    Entry,
    Verdict,
    build,
    catalogue,
    choose,
)
from benchmarks.architectures import judge as judge_entry
from benchmarks.catalogue_table import BEGIN, END, put_into, render
from kvr_mpi.errors import ConfigError, ModelError
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.prefill.one_prompt import prefill_kvr, prefill_single
from kvr_mpi.prefill.registry import STRATEGIES

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "how-it-works.md"
# Mechanism by mechanism; each is there once.
EXACT = {
    "llama mqa": "one head of keys for all",
    "mistral": "a window in every layer, grouped heads",
    "qwen2 some windows": "windows in some layers",
    "gemma2": "soft caps, windows in turn",
    "gpt_oss": "sinks, yarn, experts",
    "gpt2": "learned positions",
    "falcon mqa": "its own call of scaled_dot_product_attention",
    "opt padding in the prompt": "positions made from a mask",
    "phi3 longrope above": "rotary frequencies by the length of the prompt",
    "llama dynamic above": "the same, of another kind",
    "phimoe window": "a window by the mask alone",
    "bloom": "ALiBi, attention of its own",
    "deepseek_v3": "latent attention",
    "llama4_text": "chunks",
    "gemma3n_text": "layers that share keys",
    "qwen3_next": "gated linear attention between attention layers",
    "granitemoehybrid": "state space layers between attention layers",
    "nemotron_h": "states that its own code for a single token leaves a little different",
    "lfm2": "convolutions between attention layers",
    "roberta": "positions that begin after the padding id",
}
NOT_A_CHAIN = {
    "bert as an encoder": "sees the tokens to come",
    "minimax": "a cache of its own",
    "mamba": "plain transformers does not go on with several tokens",
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """What the command says of the sample."""
    lines = tmp_path_factory.mktemp("architectures") / "lines.jsonl"
    names = ",".join([*EXACT, *NOT_A_CHAIN])
    command = [sys.executable, "-m", "benchmarks", "architectures", "--only", names, "--json", str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = [Verdict.from_json(line) for line in lines.read_text().splitlines()]
    assert done.returncode == int(any(verdict.kind in BAD for verdict in found)), done.stderr
    assert f"of {len(EXACT) + len(NOT_A_CHAIN)}: " in done.stdout
    return {verdict.name: verdict for verdict in found}


@pytest.mark.parametrize("name", EXACT)
def test_every_mechanism_is_exact(verdicts: dict[str, Verdict], name: str) -> None:
    verdict = verdicts[name]
    assert verdict.kind.startswith("exact"), (verdict.kind, verdict.reason)
    assert sum("chain" in strategy for strategy in verdict.exact) == 5


@pytest.mark.parametrize("name", list(EXACT)[:8])
def test_plain_attention_takes_several_documents_in_a_row(verdicts: dict[str, Verdict], name: str) -> None:
    assert {"packed", "prefix", "packed prefix"} <= set(verdicts[name].exact), verdicts[name].refused


@pytest.mark.parametrize("name", NOT_A_CHAIN)
def test_what_cannot_be_a_chain_is_refused_by_name(verdicts: dict[str, Verdict], name: str) -> None:
    verdict = verdicts[name]
    assert verdict.kind == REFUSED, (verdict.kind, verdict.reason)
    assert verdict.architecture in verdict.reason


def change_the_first_token(loaded: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
    return prefill_kvr(loaded, [ids[0] + 1, *ids[1:]], *args, **kwargs)


def test_a_wrong_answer_past_the_self_check_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness, "prefill_kvr", change_the_first_token)
    verdict = judge_entry(catalogue()["llama gqa"])
    assert verdict.kind == WRONG
    assert "chain 0-53-90: the logits by" in verdict.reason
    assert "ring 2" in verdict.exact


def test_a_strategy_may_be_refused_but_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    ring = STRATEGIES["ring"]
    broken = replace(ring, published=replace(ring, make=fail))
    monkeypatch.setattr(exactness, "STRATEGIES", {**STRATEGIES, "ring": broken})
    error: Exception = ModelError("no ring of this model")
    verdict = judge_entry(catalogue()["llama gqa"])
    assert verdict.kind == "exact (fast)"
    assert verdict.refused["ring 2"] == "no ring of this model"
    error = KeyError("layers")
    verdict = judge_entry(catalogue()["llama gqa"])
    assert verdict.kind == TRACEBACK and "ring 2: KeyError: 'layers'" in verdict.reason


@pytest.mark.slow
def test_an_entry_that_kills_its_process_takes_no_other_with_it() -> None:
    entries = catalogue() | {"no such": Entry("no such", "no such")}
    del entries["llama"]
    unknown_there, good = survey.survey(entries, ["no such", "llama mha"], processes=1)
    assert unknown_there.kind == TRACEBACK and "ended with exit code 1: KeyError" in unknown_there.reason
    assert (good.name, good.kind) == ("llama mha", "exact (fast)")


def test_an_entry_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "START_S", 0.1)
    found = list(survey.survey(catalogue(), ["llama", "mistral"], processes=2, limit_s=0.1))
    assert {verdict.name for verdict in found} == {"llama", "mistral"}
    assert all(verdict.kind == TRACEBACK for verdict in found)
    assert all(verdict.reason.startswith("it did not end within 0.1 s") for verdict in found)


def test_choosing_entries() -> None:
    entries = catalogue()
    assert choose(entries, []) == list(entries)
    with pytest.raises(ConfigError, match=r"--only phi3 longrop: not one of the .*phi3 longrope above"):
        choose(entries, ["llama", "phi3 longrop"])


def logits(name: str) -> torch.Tensor:
    model = build(catalogue()[name])
    prepare_model(model, chain=False)
    found = prefill_single(model, exactness.prompt(90, 199), torch.device("cpu")).logits
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("mistral", "mistral full"),
        ("phimoe window", "phimoe"),
        ("phi3 longrope above", "phi3 longrope below"),
        ("llama dynamic above", "llama dynamic below"),
        ("llama yarn above", "llama"),
        ("llama llama3 above", "llama"),
        ("llama linear", "llama"),
        ("llama proportional", "llama"),
        ("gemma2", "gemma2 no cap"),
        ("falcon alibi", "falcon mha"),
        ("gpt2 padding in the prompt", "roberta padding in the prompt"),
    ],
)
def test_what_a_variant_is_there_for_shows_in_its_logits(name: str, without: str) -> None:
    one, other = logits(name), logits(without)
    assert float((one - other).abs().max()) > 100 * exactness.NOISE * float(other.max() - other.min())


def test_the_table() -> None:
    entries = {
        "llama": Entry("llama", "llama"),
        "llama odd": Entry("llama odd", "llama"),
        "bert": Entry("bert", "bert"),
    }
    exact = ["chain 0-90", "ring 2", "ring 3", "tsp-causal 2", "tsp-dense 2", "prefix", "packed", "packed prefix"]
    found = [
        Verdict("bert", "bert", "BertLMHeadModel", REFUSED, "sees | all"),
        Verdict("llama odd", "llama", "Llama", "exact (generic)", "", exact[:-2], {"packed": "it is odd"}),
        Verdict("llama", "llama", "Llama", "exact (fast)", "", exact),
    ]
    text = render(entries, found, "kvr-mpi 1", datetime.date(2026, 11, 22))
    assert "kvr-mpi 1, 2026-11-22" in text
    counts = re.findall(r"^\| (.*) \| .* \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert counts[:3] == [("exact (fast)", "1", "0"), ("exact (generic)", "0", "1"), ("refused", "1", "0")]
    lines = ["- **exact (fast): all**: llama", "- **refused: sees \\| all**: bert", "Variants:"]
    lines.append("- **exact (generic): all but packed**: llama odd")
    places = [text.index(f"{line}\n") for line in lines]
    assert places == sorted(places)
    page = put_into(f"# Page\n{BEGIN}\nold\n{END}\nmore\n", text)
    assert page == f"# Page\n{BEGIN}\n{text}{END}\nmore\n"


def test_the_table_in_docs_has_every_entry() -> None:
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].replace("\n  ", " ")
    rows = re.findall(r"^- \*\*(.*?): .*?\*\*: (.*)$", text, re.MULTILINE)
    assert sorted(name for _, names in rows for name in names.split(", ")) == sorted(catalogue())
    assert not {kind for kind, _ in rows} & set(BAD)


@pytest.mark.long
def test_every_architecture(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    command = [sys.executable, "-m", "benchmarks", "architectures", "--json", str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    found = [Verdict.from_json(line) for line in lines.read_text().splitlines()]
    assert [(verdict.name, verdict.reason) for verdict in found if verdict.kind in BAD] == []
    assert done.returncode == 0
    assert {verdict.name for verdict in found} == set(catalogue())
    own = [verdict for verdict in found if verdict.name == verdict.model_type]
    assert sum(verdict.kind.startswith("exact") for verdict in own) >= 130
    assert sum(verdict.kind == NOT_HERE for verdict in own) <= 8
