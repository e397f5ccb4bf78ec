"""A job's [decode] as a placement: which, with how many copies, and what it promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import tiny

from kvr_mpi.compress.decode_settings import DecodeSettings
from kvr_mpi.decode.placing import HeadSharing, open_sharing
from kvr_mpi.errors import ConfigError


@pytest.mark.parametrize(
    ("placement", "ranks", "efficiency"),
    [
        ("static", 2, 0.75),
        ("static", 4, 0.75),
        ("best-effort", 2, 0.75),
        ("equal", 2, 1.0),
        ("proportional", 1, 1.0),
        ("proportional", 2, 1.0),
        ("proportional", 4, 1.0),
    ],
)
def test_three_equal_heads_on_ranks_that_do_not_divide_them(placement: Any, ranks: int, efficiency: float) -> None:
    settings = DecodeSettings(mode="head-parallel", placement=placement)
    found = HeadSharing(settings, layers=2, kv_heads=3)
    assert found.efficiency(ranks) == pytest.approx(efficiency, abs=1e-3)
    assert found.placing(ranks)([1.0, 1.0, 1.0], ranks).copies <= ranks - 1
    assert placement in found.describe(ranks)


def test_a_profile_is_what_heads_are_placed_by_and_of_this_model(tmp_path: Path) -> None:
    loaded = tiny("llama-gqa")
    layers, kv_heads = len(loaded.shape.layers), loaded.shape.layers[0].num_kv_heads
    path = tmp_path / "heads.json"
    settings = DecodeSettings(mode="head-parallel", placement="best-effort", profile=str(path))

    def opened(**about: str) -> HeadSharing:
        path.write_text(json.dumps({"counts": [[300] + [100] * (kv_heads - 1)] * layers, **about}))
        found = open_sharing(settings, loaded, None)
        assert isinstance(found, HeadSharing) and found.loads is not None
        return found

    heaviest, others = 300, 100 * (kv_heads - 1)
    mean = (heaviest + others) / 2
    assert opened().efficiency(2) == pytest.approx(mean / max(heaviest, others))
    assert opened(model=loaded.fingerprint).layers == layers
    with pytest.raises(ConfigError, match="decode.profile = .* is for another model"):
        opened(model="another")
