"""`first-token`, `fairkv`, `forecast` and `paper` as a user runs them, and what their figures are made of."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from constants import ROOT
from made_jobs import with_settings
from models import tiny

from benchmarks.calibrate import calibration_cells, fit
from benchmarks.compress import main as compress
from benchmarks.first_token import STRATEGIES
from benchmarks.forecast import main as forecast
from benchmarks.pairs import Patience, drift_of, measure_pairs, ratio_of, ratios_of
from benchmarks.paper_cells import paper_cells, score
from benchmarks.paper_model import paper_hardware
from benchmarks.roofline import (
    ATTENTION,
    PRODUCTS,
    REST,
    measure_rooflines,
)
from kvr_mpi.errors import EXIT_CONFIG
from kvr_mpi.model.attention_hook import prepare_model
from kvr_mpi.model.cpu_attention import KernelLibrary
from kvr_mpi.model.kernels import always
from kvr_mpi.model.products import PANELS, find_products, give_products
from kvr_mpi.transport.local import LocalTransport, run_local


@pytest.mark.slow
def test_bench_measures_every_strategy(tmp_path: Path, tiny_model_dir: Path, mpirun: Any) -> None:
    rows_file, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    command = [sys.executable, "-m", "benchmarks", "first-token"]
    words = ["--model", tiny_model_dir, "--contexts", "128", "--repeats", "2", "--roofline", "--dtype", "float32"]
    run = mpirun(2, [*command, *words, "--json", rows_file, "--plot", plot], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    rows = json.loads(rows_file.read_text())
    assert [(row["strategy"], row["context_tokens"]) for row in rows] == [(name, 128) for name in STRATEGIES]
    for row in rows:
        # Ours runs beside each of the others.
        is_ours = row["strategy"] == row["ours"] == "kvr-s"
        assert row["size"] == 2 and (row["repeats"], row["pairs"]) == (
            (2 * (len(STRATEGIES) - 1), 0) if is_ours else (2, 2)
        )
        assert row["times_ours_low"] <= row["times_ours"] <= row["times_ours_high"] and not row["is_told_apart"]
        assert 0 < row["ttft_min_s"] <= row["ttft_s"] <= row["ttft_max_s"]
        assert 0 <= row["wait_s"] <= row["ttft_max_s"] and 0 < row["least_s"] < row["ttft_min_s"]
        single = next(r for r in rows if r["strategy"] == "single")
        assert row["runs_in"].startswith("float32") and row["error"] < 1e-5
        assert row["speedup_over_single"] == pytest.approx(single["times_ours"] / row["times_ours"])
        if row["strategy"].startswith("kvr"):
            first, second = map(int, row["slices"].split("+"))
            assert first + second == row["context_tokens"]
            # Only the first rank sends, and only its own slice: 3 layers, K and V of 2 heads of 8, float32.
            assert row["link_bytes"] == first * 3 * 2 * 2 * 8 * 4
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert all(strategy in run.stdout for strategy in STRATEGIES)
    assert run.stdout.count("products with weights") == 1 and "the best runs reach" in run.stdout
    words = ["--model", tiny_model_dir, "--contexts", "64", "--repeats", "1"]
    usual = mpirun(2, [*command, *words, "--strategies", "ring-lent,kvr-s", "--json", rows_file], cwd=ROOT)
    assert usual.returncode == 0, usual.stderr
    for row in json.loads(rows_file.read_text()):
        assert row["runs_in"] == "bfloat16, our kernels" and 0 < row["error"] < 0.05
    wrong = mpirun(2, [*command, *words, "--strategies", "kvr-x"], cwd=ROOT)
    assert wrong.returncode == EXIT_CONFIG and "'kvr-x': expected some of single" in wrong.stderr


# What a prefill is made of, counted by hand


TOKENS = 96


def test_every_product_is_counted_once(library: KernelLibrary) -> None:
    loaded = tiny.__wrapped__("llama-gqa")
    give_products(loaded.model, dict.fromkeys(find_products(loaded.model), always(PANELS)), library)
    prepare_model(loaded.model, chain=True)
    config = loaded.model.config
    (found,) = measure_rooflines(loaded, LocalTransport(), [TOKENS])
    products, attention, rest = found.parts
    assert [part.name for part in found.parts] == [PRODUCTS, ATTENTION, REST]

    hidden, heads, size = config.hidden_size, config.num_attention_heads, config.head_dim
    before = hidden * (heads + 2 * config.num_key_value_heads) * size
    after = hidden * heads * size + 3 * hidden * config.intermediate_size
    whole = TOKENS * (config.num_hidden_layers - 1) * (before + after)
    last = TOKENS * before + after  # the last query is all that is asked of it
    assert products.flop == 2 * (whole + last + hidden * config.vocab_size)

    pairs = (config.num_hidden_layers - 1) * TOKENS * (TOKENS + 1) // 2 + TOKENS
    assert attention.flop == 4 * heads * size * pairs
    assert products.seconds > 0 and attention.seconds > 0 and rest.flop == 0
    assert found.seconds > found.least_s > 0
    weights = 4 * config.num_hidden_layers * (before + after)
    assert all(part.nbytes > 0 for part in found.parts) and products.nbytes > weights


# Every placement decodes the same documents


WAYS = ["whole, SHA", "whole, apart", "SHA", "best effort", "equal copies", "in proportion", "apart"]
SMALL = ["compress.method=ada-snapkv", "compress.window=16"]


def test_every_way_decodes_the_same_documents(mpirun: Any, job: Path, tmp_path: Path) -> None:
    settings = with_settings(*SMALL, "compress.budget=0.5", "generation.max_new_tokens=40")
    words = [job, "--repeats", "1", *settings, "--budgets", "48", "--json", tmp_path / "rows.json"]
    ran = mpirun(2, [sys.executable, "-m", "benchmarks", "fairkv", *words], cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["way"] for row in rows] == WAYS and all(way in ran.stdout for way in WAYS)
    documents = int(re.findall(r"(\d) prompts of (\d+) to \d+ tokens, prefilled", ran.stderr)[0][0])
    whole = rows[0]
    for row in rows:
        is_whole, is_apart = row["way"].startswith("whole"), row["way"].endswith("apart")
        assert row["same_answers"] == row["documents"] == documents >= 2 and row["ranks"] == 2
        # The shortest of five documents are no longer than the budget, and left out.
        assert row["kept_tokens"] == (row["tokens"] / documents if is_whole else 48)
        assert 0 < row["best_s"] <= row["step_s"] and 0 < row["forecast_s"] and 0 < row["attention_s"]
        assert row["tokens_per_s"] == pytest.approx(documents / row["step_s"])
        assert is_whole or sum(row["kv_bytes"]) < sum(whole["kv_bytes"])
        assert (row["predicted"] is None) == is_apart
        assert all(0.5 <= one <= 1 for said in (row["predicted"], row["measured"]) if said for one in said.values())
        for one, other in (("whole", "whole, SHA"), ("sha", "SHA")):
            for word in ("", "compute_"):
                ratio = row[f"{word}{one}_over_this"]
                assert ratio["low"] <= ratio["median"] <= ratio["high"] and ratio["pairs"] == 1
                assert row["way"] != other or ratio["median"] == 1
    found = {row["way"]: row for row in rows}
    assert found["in proportion"]["predicted"]["sync"] >= found["SHA"]["predicted"]["sync"]
    assert found["whole, SHA"]["heads"] == [1, 1] and found["apart"]["heads"] == [2, 2]


def test_reference_answers_are_scored_after_compressed_texts(tiny_model_dir: Path, tmp_path: Path) -> None:
    texts = {"long": "The boats left the harbour. " * 20, "short": "Nobody saw the boats. " * 8}
    rows = [{"id": name, "text": text, "query": "Who saw it?", "reference": "Nobody."} for name, text in texts.items()]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--questions", tmp_path / "asked.jsonl", "--budgets", "0.3", "--window", "16", "--needles", "0"]
    words += ["--methods", "ada-snapkv", "kvzip", "--json", tmp_path / "rows.json"]
    compress(["--model", str(tiny_model_dir), *map(str, words)])
    found = json.loads((tmp_path / "rows.json").read_text())["continuations"]
    assert [row["document"] for row in found] == 5 * ["short"] + 5 * ["long"], "the shortest first"
    for full, none, *ours in (found[:5], found[5:]):
        assert (full["method"], none["method"]) == ("full", "none") and none["nll"] != full["nll"] > 0
        assert [row["method"] for row in ours] == ["ada-snapkv", "ada-snapkv", "kvzip"]
        assert all(row["kept"] < full["tokens"] and row["more"] == row["nll"] - full["nll"] != 0 for row in ours)


# Ratios of pairs: what is said of them, how long they are measured, and that a drift does not change them


def itself(seconds: float) -> float:
    return seconds


class DriftingMachine:
    """Ways of known speed on a machine that gets slower with every run, and is noisy."""

    def __init__(self, noise: float, drift: float, **speeds: float) -> None:
        self.noise, self.drift, self.speeds, self.ran = noise, drift, speeds, list[str]()
        self.random = random.Random(7)

    def measure(self, name: str) -> float:
        self.ran.append(name)
        slower = 1.0 + self.drift * len(self.ran)
        return self.speeds[name] * slower * (1.0 + self.random.uniform(-self.noise, self.noise))


def measured(machine: DriftingMachine, patience: Patience, *others: str) -> dict[str, list[float]]:
    def rank(world: LocalTransport) -> dict[str, list[tuple[float, float]]]:
        return measure_pairs(world, "ours", others, machine.measure, itself, patience)

    return {name: ratios_of(runs, itself) for name, runs in run_local(1, rank)[0].items()}


def test_a_drift_hides_in_seconds_and_not_in_ratios() -> None:
    machine = DriftingMachine(0.01, 0.02, ours=1.0, other=1.05)
    ratio = ratio_of(measured(machine, Patience(20), "other")["other"])
    assert ratio.is_told and ratio.low <= 1.05 <= ratio.high and ratio.median == pytest.approx(1.05, abs=0.02)
    ours = [1.0 + 0.02 * number for number, name in enumerate(machine.ran) if name == "ours"]
    assert "this machine drifts" in (drift_of(ours) or "")


def test_the_same_is_never_said_to_be_faster() -> None:
    told = 0
    for seed in range(40):
        machine = DriftingMachine(0.2, 0.0, ours=1.0, other=1.0)
        machine.random.seed(seed)
        ratio = ratio_of(measured(machine, Patience(8), "other")["other"])
        told += ratio.is_told
        assert ratio.is_told == (not ratio.describe().startswith("the same")), ratio
    assert told <= 6, "of 40 pairs of equal ways two are expected, by chance"


def test_ranks_measure_the_same_pairs_though_one_has_the_clock() -> None:
    """Every rank calls the same ways in the same order, whatever its own clock says."""
    orders: dict[int, list[str]] = {0: [], 1: [], 2: []}
    ticks = itertools.count(1)

    def rank(world: LocalTransport) -> int:
        def measure(name: str) -> float:
            orders[world.rank].append(name)
            return 1.0 + 0.01 * len(orders[world.rank]) + 0 * next(ticks)

        return len(measure_pairs(world, "ours", ["a", "b"], measure, itself, Patience(400, time_limit_s=0.02))["a"])

    assert len(set(run_local(3, rank))) == 1 and orders[0] == orders[1] == orders[2]


# `forecast` and `paper`: forecasts, and the paper's cells, by 15 of which the A100 profile is fitted


FORECAST = {"single", "tsp-dense", "tsp-causal", "ring", "kvr-e", "kvr-s"}


def run(*args: str | Path, command: click.Command = forecast) -> str:
    result: Result = CliRunner().invoke(command, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_table_and_rows_say_who_wins(tmp_path: Path) -> None:
    lines = run("--ranks", "1,2", "--contexts", "8k").splitlines()
    assert "h100-80gb" in lines[0] and "not measured" in lines[0]
    assert [line.split()[:2] for line in lines[-2:]] == [["8192", "1"], ["8192", "2"]]
    assert lines[-1].split()[-1] == "kvr-s"
    args = ("--model", "mistral 7b", "--hardware", "a100-80gb", "--ranks", "1,4", "--contexts", "4k,16k")
    found = json.loads(run(*args, "--json"))
    assert [(row["context_tokens"], row["ranks"]) for row in found["rows"]] == list(
        itertools.product((4096, 16384), (1, 4))
    )
    for row in found["rows"]:
        assert set(row["ttft_s"]) == (FORECAST if row["ranks"] > 1 else {"single"})
        assert row["winner"] == min(row["ttft_s"], key=row["ttft_s"].get)
        assert row["bound_s"] <= min(row["ttft_s"].values())
        if row["ranks"] > 1:
            assert row["efficiency"] == pytest.approx(row["ttft_s"]["single"] / row["ranks"] / row["ttft_s"]["kvr-s"])
    file = tmp_path / "rows.json"
    assert run(*args, "--json", file) == "" and json.loads(file.read_text()) == found


SHIPPED = paper_hardware()


def test_the_shipped_profile_is_what_the_fit_gives() -> None:
    fitted, shipped = fit(calibration_cells()).model_dump(), SHIPPED.model_dump()
    for found in (fitted, shipped):  # one level, so that approx can compare it
        found |= {
            f"{model} {key}": rate for model, rates in found.pop("for_models").items() for key, rate in rates.items()
        }
    numbers = {key for key, value in shipped.items() if isinstance(value, float)}
    assert {key: fitted[key] for key in numbers} == pytest.approx({key: shipped[key] for key in numbers}, rel=2e-3)
    assert {key: fitted[key] for key in fitted.keys() - numbers} == {
        key: shipped[key] for key in shipped.keys() - numbers
    }


def test_the_other_cells_are_forecast() -> None:
    calibrating = set(calibration_cells())
    others = score([cell for cell in paper_cells() if cell not in calibrating], SHIPPED)
    assert len(others.cells) == 30
    assert others.ttft.median is not None and others.ttft.median <= 0.03
    assert others.ttft.p90 is not None and others.ttft.p90 <= 0.08
