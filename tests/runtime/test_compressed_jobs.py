"""Jobs with [compress]: the same answers on any number of ranks, and records that say what was dropped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from constants import Kvr

SMALL = ("compress.method=ada-snapkv", "compress.budget=64", "compress.window=16")


def test_another_way_to_compress_is_another_run(tmp_path: Path, run_job: Any, run_kvr: Kvr) -> None:
    """Also where only what a profile says has changed."""
    limit, profile = "documents.limit=1", tmp_path / "heads.json"
    shown = run_kvr("inspect", run_job(1, *SMALL, limit, to="out").folder)[1]
    assert "compress  method ada-snapkv, budget 64," in shown
    for change in ((*SMALL, "compress.budget=65"), (*SMALL, "compress.observes=document"), ()):
        assert re.search(r"compress(\.\w+)? was", run_job(1, *change, limit, to="out", words=["--resume"], code=78).log)
    settings = (
        "compress.method=headkv",
        f"compress.profile={profile}",
        "compress.budget=40",
        "compress.window=16",
        limit,
    )
    profile.write_text(json.dumps({"counts": [[20, 60], [30, 40], [90, 16]]}))
    run_job(1, *settings, to="profile")
    profile.write_text(json.dumps({"counts": [[60, 20], [30, 40], [90, 16]]}))
    assert "(compress." in run_job(1, *settings, to="profile", words=["--resume"], code=78).log
