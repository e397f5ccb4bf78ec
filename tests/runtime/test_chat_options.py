"""What a chat template depends on: the date, which is the run's, and its variables."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from constants import Kvr
from made_jobs import TEXT

from kvr_mpi.errors import EXIT_BAD_DATA, EXIT_CONFIG
from kvr_mpi.store.results import open_results

DATED = """{%- if strftime_now is defined %}
    {%- set today = strftime_now("%-d %b %Y") %}
{%- endif %}
<|im_start|>system
Today is {{ today }}.<|im_end|>
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>
{% endif %}"""


class Clock(datetime):
    """Today's date in these tests."""

    today_is = datetime(2026, 1, 31, 23, 59)

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return cls.today_is if tz is None else datetime.now(tz)


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model with a dated chat template, on the last day of January."""
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    monkeypatch.setattr("kvr_mpi.cli.run.datetime", Clock, raising=False)
    monkeypatch.setattr(Clock, "today_is", Clock.today_is)
    folder = tmp_path / "dated"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "chat_template.jinja").write_text(DATED)
    return f"model.path={folder}"


def test_a_run_keeps_its_date(model: str, run_job: Any, ask_about: Any, tmp_path: Path) -> None:
    settings = (model, "prompt.template={text}", "generation.max_new_tokens=2")
    kept = run_job(2, *settings, "output.kv=true", to="kept")
    first = run_job(2, *settings, "documents.limit=2", to="out").records
    assert open_results(tmp_path / "out").header.identity["date"] == "2026-01-31", "the same for jobs of one day"
    Clock.today_is = datetime(2026, 2, 1, 0, 1)
    assert "nothing left to do" in run_job(1, *settings, "documents.limit=2", to="out", words=["--resume"]).log
    (tmp_path / "corpus" / "new.txt").write_text("Something new. " + TEXT)
    extended = run_job(2, *settings, to="out").records
    assert len(extended) > len(first) and all(extended[name] == record for name, record in first.items())
    asked = run_job(1, model, of=ask_about(kept.folder, who="Who saw it?"), to="asked").records
    assert asked and all(0 < record.computed_tokens < 40 for record in asked.values())
    # A new run has the new date, unless it is given one.
    today = run_job(1, *settings, to="today").records
    given = run_job(1, *settings, "prompt.date='2026-01-31'", to="given").records
    for name, record in extended.items():
        assert record.prompt_sha256 == given[name].prompt_sha256 != today[name].prompt_sha256
    refused = run_job(1, *settings, "prompt.date='2026-03-01'", to="out", words=["--resume"], code=EXIT_CONFIG)
    assert "prompt.date was" in refused.log


def test_the_shares_of_an_array_have_one_date(model: str, run_job: Any, run_kvr: Kvr, tmp_path: Path) -> None:
    settings = (model, "prompt.template={text}", "generation.max_new_tokens=2")
    whole = run_job(1, *settings).records
    run_job(1, *settings, "documents.shard=1/2", to="array/share-1-of-2")
    Clock.today_is = datetime(2026, 2, 1, 0, 1)
    run_job(1, *settings, "documents.shard=0/2", to="array/share-0-of-2")
    assert run_kvr("merge", tmp_path / "array", "-o", tmp_path / "all.h5")[0] == 0
    found = {record.id: record.prompt_sha256 for record in open_results(tmp_path / "all.h5").records()}
    assert found == {name: record.prompt_sha256 for name, record in whole.items()}


def test_variables_of_the_chat_template(model: str, run_job: Any, batch_of: Any) -> None:
    settings = (model, "prompt.template={text}", "generation.max_new_tokens=2", "documents.limit=1")
    off = "prompt.template_args={enable_thinking=false}"
    on, without = run_job(1, *settings).records, run_job(1, *settings, off, to="off").records
    assert on["doc-0.txt"].prompt_tokens < without["doc-0.txt"].prompt_tokens
    refused = run_job(1, *settings, to="off", words=["--resume"], code=EXIT_CONFIG)
    assert "prompt.template_args" in refused.log
    wrong = run_job(1, *settings, "prompt.template_args={enable_thinkin=false}", to="wrong", code=EXIT_CONFIG)
    assert "enable_thinkin" in wrong.log
    bodies: dict[str, Any] = {"on": {}, "off": {"enable_thinking": False}, "wrong": {"thinking": False}}
    batch = batch_of(*((name, {"chat_template_kwargs": given}) for name, given in bodies.items()))
    for more, expected in (((), ["on"]), ((off,), [])):
        to = f"batch-{len(expected)}"
        ran = run_job(1, model, "generation.max_new_tokens=2", *more, of=batch, to=to, code=EXIT_BAD_DATA).records
        assert "has no variable 'thinking'" in (ran["wrong"].error or "")
        tokens = {name: ran[name].prompt_tokens for name in ("on", "off")}
        assert (tokens["on"] < tokens["off"]) == bool(expected)
