"""What ``kvr plan`` shows without MPI, what it cannot plan, and jobs that follow a plan."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_jobs import with_settings
from made_tables import a_table

from kvr_mpi.cli.plan import plan as plan_command
from kvr_mpi.costs.costmodel import single_seconds
from kvr_mpi.errors import ConfigError
from kvr_mpi.model import load_outline
from kvr_mpi.runtime import outcome
from kvr_mpi.schedule.history import History, PastJob, file_of, keep
from kvr_mpi.store.results import open_results
from kvr_mpi.tuning.lookup import choose_slices
from kvr_mpi.tuning.table import ModelIdentity, save_table


def shown(*words: Any) -> str:
    return CliRunner().invoke(plan_command, list(map(str, words)), catch_exceptions=False).stdout


def planned(*words: Any) -> Any:
    return json.loads(shown(*words, "--json"))


def by_id(plan: Any) -> dict[str, Any]:
    return {document["id"]: document for document in plan["documents"]}


@pytest.mark.slow
def test_plan_shows_documents_and_what_else_could_be_done(job: Path, kvr: Path, warm_start: list[str]) -> None:
    command = [str(job), "--ranks", "4", "--hardware", "h200"]
    # Once as a user starts it, without MPI.
    text = subprocess.run([*warm_start, kvr, "plan", *command], capture_output=True, text=True, check=True).stdout
    for words in ("profile h200: data sheet", "lower bound", "2: ", "8: ", "one rank per document"):
        assert words in text, text
    assert "2 documents cannot be processed" in text
    assert "  empty.txt: the document is empty" in text

    found = planned(*command)
    documents = by_id(found)
    assert len(documents) == 14 and found["ranks"] == 4 and not found["misfits"]
    assert found["lower_bound_s"] <= found["makespan_s"] <= found["data_parallel_s"]
    long, bad = documents["doc-08.txt"], documents["empty.txt"]
    assert long["tokens"] > 6000 and long["slices"][-1] == long["tokens"] and long["memory_bytes"] > 0
    assert 0 < long["ttft_s"] < long["end_s"] and bad["tokens"] == 0 and "error" in bad["reason"]
    share = planned(*command, *with_settings("documents.shard=1/4"))
    assert set(by_id(share)) == set(sorted(documents)[1::4])


def test_several_prompts_are_planned_and_what_they_share_is_said(job: Path) -> None:
    text = job.read_text().replace('"auto"', "2")
    asked = "\n[prompt.template]\n" + "".join(f'{name} = "{{text}} {name}?"\n' for name in ("who", "what"))
    (other := job.with_name("two.toml")).write_text(re.sub("prompt.template = .*", "", text) + asked)
    options = ("--ranks", "2", "--hardware", "h200")
    words = shown(other, *options)
    assert "2 prompts per document: a shared prefill saves" in words and "with 'auto'" not in words
    assert set(re.findall(r"^ *doc-\d\d.txt +\d+ +(\S+) ", words, re.MULTILINE)) == {"0-1"}, "as the job says"
    nowhere = with_settings("output.kv=true", f"output.path={'x' * 5000}")  # no file system takes such a name
    assert "; the free space is unknown\n" in shown(job, *options, *nowhere)
    two, one = (planned(each, *options)["makespan_s"] for each in (other, job))
    assert one < two < 3 * one


@pytest.mark.slow
def test_a_slow_machine_makes_a_chain(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = {"name": "slow", "source": "invented", "gemm_flop_per_s": 1e9, "attention_flop_per_s": 1e9}
    profile |= {"link_bytes_per_s": 1e9, "link_latency_s": 1e-5}
    profile |= {"memory_bytes_per_s": 1e10, "memory_bytes": 1e9}
    (slow := tmp_path / "slow.json").write_text(json.dumps(profile))
    monkeypatch.setenv("SLURM_NTASKS", "4")  # without --ranks, those of the allocation
    command = [job, "--hardware", slow]
    found = planned(*command)
    chains = {name: document["ranks"] for name, document in by_id(found).items()}
    assert chains["doc-08.txt"] == 4 > chains["doc-00.txt"] and len(found["documents"][0]["slices"]) == 5
    compress = [*command, *with_settings("compress.method=snapkv", "compress.budget=100")]
    ends = (planned(*compress, "--set", f"compress.observes={end}") for end in ("question", "document"))
    whole, known, unknown = (by_id(plan)["doc-08.txt"]["memory_bytes"] for plan in (found, *ends))
    assert unknown >= whole and known != unknown, "what follows the text is not known: all of it is counted"
    slow.write_text(json.dumps(profile | {"memory_bytes": 1000.0}))
    found = planned(*command)
    assert len(found["misfits"]) == 12 and "more ranks do not help" in found["misfits"][0]["reason"]
    assert shown(*command).count("does not fit in memory: ") == 12


def test_a_lookup_table_of_this_model_says_what_things_cost(
    job: Path, long_model_dir: Path, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVR_CACHE", str(tmp_path / "cache"))
    outline = load_outline(str(long_model_dir), dtype="float32", offline=True, cache_dir=cache_dir)
    model = ModelIdentity(name="tiny", fingerprint=outline.fingerprint, architecture="LlamaForCausalLM")
    for name, ranks in (("mine", 2), ("mine", 4), ("other", 2), ("foreign", 2)):
        table = a_table(ranks=ranks)
        changes = {"hardware": name} | ({} if name == "foreign" else {"model": model})
        table = table.model_copy(update={"key": table.key.model_copy(update=changes)})
        save_table(table, tmp_path / "tables" / f"{name}-{ranks}.json")
    command = [job, "--ranks", "4"]
    found = planned(*command, "--hardware", "tables/mine-4.json")
    assert found["costs"].startswith("lookup table for 4 ranks of mine")
    documents = by_id(found)
    assert documents["doc-08.txt"]["ranks"] == 4 and documents["doc-08.txt"]["memory_bytes"] is None
    expected = single_seconds(a_table().rates, documents["doc-00.txt"]["tokens"])
    assert documents["doc-00.txt"]["ttft_s"] == pytest.approx(expected, rel=0.05)
    settings = with_settings("parallel.ranks_per_chain=4", "parallel.partition=tables/mine-4.json")
    cut = by_id(planned(*command, *settings))["doc-08.txt"]
    assert tuple(cut["slices"]) == choose_slices(a_table(ranks=4), cut["tokens"], 4).bounds
    for options, words in (
        ([], "the speed of a rank is unknown"),  # tables that nobody named are not read
        (["--hardware", "tables"], r"mine-4.json \(mine\).*other-2.json \(other\)"),
        (["--hardware", "tables/foreign-2.json"], "models/Tiny"),
    ):
        with pytest.raises(ConfigError, match=words):
            shown(*command, *options)
    (tmp_path / "tables" / "other-2.json").unlink()
    assert planned(*command, "--hardware", "tables")["costs"] == found["costs"], "the only machine there"


def test_earlier_jobs_say_how_long_this_one_takes(
    job: Path, long_model_dir: Path, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an interval, and with answers as long as theirs; a profile or a table is asked where it is named."""
    monkeypatch.setenv("KVR_CACHE", str(tmp_path))
    fingerprint = load_outline(str(long_model_dir), dtype="float32", offline=True, cache_dir=cache_dir).fingerprint
    given = {"date": "2026-11-26T08:00:00Z", "prefill_s": 100.0, "decode_s": 50.0, "seconds": 300.0, "start_s": 9.0}
    past = PastJob(**given, answer_tokens=3.0, limit_tokens=999)
    history = History(fingerprint=fingerprint, dtype="float32", device="cores", ranks=4, rates=a_table().rates)
    alike = past.model_copy(
        update={"prefill_s": 200.0, "decode_s": 100.0}
    )  # after one job that took twice its forecast
    keep(file_of(tmp_path, fingerprint, "float32", "cores", 4), history.after(past).after(alike))
    command = [job, "--ranks", "4"]
    found = planned(*command)
    expected = found["expected"]
    assert found["costs"].startswith("rates of earlier jobs with this model on 4 ranks (cores)")
    assert expected["low_s"] < expected["seconds"] < expected["high_s"] and expected["jobs"] == 2
    assert expected["seconds"] == pytest.approx(9 + found["makespan_s"], rel=0.01)
    longer = planned(*command, *with_settings("generation.max_new_tokens=100"))
    assert longer["makespan_s"] == found["makespan_s"]
    assert planned(*command, "--hardware", "h200")["expected"] is None
    words = r"expected: .* in 80% of cases\), including 9.00 s of startup; based on 2 earlier jobs with this model"
    assert re.search(words, shown(*command)) and "not included" not in shown(*command)


H200 = ["--hardware", "h200"]
REFUSED = [
    (H200, "--ranks 8"),
    (["--ranks", "4"], "the speed of a rank is unknown: .*h100-80gb.*kvr search"),
    (["--ranks", "4", "--hardware", "abacus"], "'abacus'.*h200"),
    (["--ranks", "4", "--hardware", "H100"], "did you mean 'h100-80gb'"),
    (["--ranks", "2", "--set", "documents.shard=20/30", *H200], "no documents in the share 20/30"),
    (["--ranks", "2", "--set", "prompt.template=x"], "prompt.template.*{text}"),
    (["--ranks", "2", "--set", "prompt.overlap_tokens=99999", *H200], "prompt.overlap_tokens = 99999: .* half"),
    (["--ranks", "2", "--set", "parallel.partition=x"], "'auto' cannot be combined with parallel.partition"),
]


@pytest.mark.parametrize(
    ("arguments", "words"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_be_planned(
    arguments: list[str], words: str, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no tables are
    monkeypatch.setenv("KVR_CACHE", str(tmp_path / "cache"))  # nor what jobs took
    for name in [name for name in os.environ if name.startswith(("SLURM", "PMI", "OMPI"))]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=words):
        shown(job, *arguments)


@pytest.mark.slow
def test_documents_without_room_are_refused_and_the_rest_is_done(job: Path, tmp_path: Path, run_here: Any) -> None:
    run = run_here(2, [job, *with_settings("documents.limit=10", "parallel.memory_gib=0.00093")])
    assert run.returncode == 65 and "9 done, 1 failed" in run.stdout, run.stderr
    (failed,) = (record for record in open_results(tmp_path / "out") if record.status == "error")
    assert failed.id == "doc-08.txt"
    assert "tokens do not fit into the memory of a chain of up to 2 ranks" in failed.error


@pytest.mark.slow
def test_the_second_job_is_forecast_by_the_first_and_a_part_of_one_says_nothing(
    job: Path, tmp_path: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome, "LEAST_S", 0.0)  # these are too short
    monkeypatch.setenv("KVR_CACHE", str(tmp_path / "cache"))
    for limit, option, jobs, is_forecast in ((4, "--overwrite", 1, False), (3, "--overwrite", 2, True)):
        run = run_here(2, [job, *with_settings(f"documents.limit={limit}"), option])
        (history,) = (tmp_path / "cache" / "jobs").glob("*.json")
        assert run.returncode == 0 and len(json.loads(history.read_text())["jobs"]) == jobs, run.stderr
        told = open_results(tmp_path / "out").cost.describe_outcome()
        assert ("the whole job took" in told and told in run.stderr) == is_forecast
    resumed = run_here(2, [job, *with_settings("documents.limit=5")])
    assert resumed.returncode == 0 and "the whole job took" not in resumed.stderr
    assert len(json.loads(history.read_text())["jobs"]) == 2
