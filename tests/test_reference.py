"""The reference is what the code says: commands, keys of a job, environment variables, exit codes, the HDF5 schema."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import get_args

import pytest
from constants import ROOT
from pydantic import BaseModel

sys.path.insert(0, str(ROOT / "docs"))

import figures
import reference

from kvr_mpi import errors
from kvr_mpi.job import JobSpec
from kvr_mpi.job.load import OTHER_VARIABLES
from kvr_mpi.store import kv_reader, log, volumes
from kvr_mpi.store.record import Record


def test_the_pages_say_what_the_code_says() -> None:
    assert not reference.differing(), "`make docs` writes them anew"
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert sorted(block["name"] for block in reference.BLOCK.finditer(text)) == sorted(reference.BLOCKS)


def test_every_key_is_there_and_says_what_it_is() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \| (.*) \| (.*) \|$", reference.job_keys(), re.MULTILINE)
    assert Counter(row[0].rpartition(".")[2] for row in rows) == Counter(keys_of_a_job())
    assert {row[0] for row in rows if "." in row[0]} == set(reference.EXPERT)
    assert not [row[0] for row in rows if not (row[1] and row[3])]
    assert ("max_new_tokens", "integer ≥ 0", "`128`") in {row[:3] for row in rows}
    assert ("mode", '`"data-parallel"`, `"head-parallel"`, `"auto"`', '`"data-parallel"`') in {row[:3] for row in rows}


def keys_of_a_job() -> Iterator[str]:
    """In the order of the sections."""
    for field in JobSpec.model_fields.values():
        kinds = (*get_args(field.annotation), field.annotation)
        section = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
        yield from section.model_fields


def test_every_variable_of_ours_is_listed() -> None:
    sources = [*ROOT.glob("kvr_mpi/**/*.py"), *ROOT.glob("slurm/*")]
    used = {name for path in sources for name in re.findall(r"\bKVR_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))}
    ours = {name for names in reference.VARIABLES.values() for name in names if name.startswith("KVR_")}
    assert {name for name in used if "__" not in name} == ours - {"KVR_SECTION__KEY"} == {*OTHER_VARIABLES}


def test_every_exit_code_has_a_meaning() -> None:
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert codes == set(errors.MEANINGS)
    shown = set(re.findall(r"`(\w+)`", reference.exit_codes()))
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert shown == {name for name, kind in kinds.items() if issubclass(kind, errors.KvrError)}


def test_the_schema_names_all_that_is_stored() -> None:
    page = reference.schema()
    stored = {field.name for field in fields(Record)} | {field.name for field in fields(log.Header)}
    stored |= {"seal", log.HEADER, log.VOLUME, log.DROPPED, log.PRUNED, *kv_reader.MEMBERS}
    stored |= {volumes.LOG, volumes.RECORDS, volumes.KV}
    assert len(stored) > 40 and not [name for name in stored if not re.search(rf"\b{name}\b", page)]
    assert f"schema_version = {log.SCHEMA_VERSION}" in page and f"Version {log.SCHEMA_VERSION}." in page


# Figures: pages are what stored measurements make of them, and each says how it was made


MEASURED = figures.load_measurements()


def test_the_pages_say_what_is_stored() -> None:
    assert len(MEASURED) > 10
    assert figures.render_summary(MEASURED) in (ROOT / "README.md").read_text()
    assert not figures.differing(MEASURED)


def test_a_plot_is_drawn_again_only_for_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinates depend on the version of matplotlib, and on the fonts."""
    monkeypatch.setattr(figures, "DRAWN", tmp_path)
    (plot := tmp_path / "first-token.svg").write_text(drawn := f"<svg>{figures.digest(MEASURED['first-token'])}</svg>")
    figures.draw(MEASURED["first-token"])
    assert plot.read_text() == drawn
    figures.draw(replace(MEASURED["first-token"], rows=MEASURED["first-token"].rows[:3]))
    assert plot.read_text() != drawn


@pytest.mark.parametrize("name", MEASURED)
def test_no_figure_without_its_command(name: str) -> None:
    one = MEASURED[name]
    assert one.title and one.machine and re.fullmatch(r"[0-9a-f]{7,40}", one.commit)
    assert one.dated_by in ("run", "commit") and date.fromisoformat(one.date) <= datetime.now(UTC).date()
    assert one.measures and all((ROOT / path).exists() for path in one.measures)
    assert one.rows if one.kind != "text" else one.said
    shown = [page for page in figures.pages() if f"<!-- begin: {name} -->" in page.read_text()]
    assert shown or one.said, "it stands on no page"
    program, target = one.command.split()[:2]
    if program == "make":
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    else:
        assert program in ("mpirun", "python")
        assert re.search(r"python -m benchmarks [a-z-]+( |$)|kvr search |kvr-run jobs/", one.command)
