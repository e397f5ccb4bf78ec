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


def sharing(**settings: Any) -> HeadSharing:
    return HeadSharing(DecodeSettings(mode="head-parallel", **settings), layers=2, kv_heads=3)


@pytest.mark.parametrize(
    ("settings", "ranks", "efficiency"),
    [
        ({"placement": "static"}, 2, 0.75),
        ({"placement": "best-effort"}, 2, 0.75),
        ({}, 2, 1.0),
        ({"placement": "equal"}, 2, 1.0),
        ({"placement": "static"}, 4, 0.75),
        ({}, 4, 1.0),
        ({}, 1, 1.0),
    ],
    ids=str,
)
def test_three_equal_heads_on_ranks_that_do_not_divide_them(
    settings: dict[str, Any], ranks: int, efficiency: float
) -> None:
    found = sharing(**settings)
    assert found.efficiency(ranks) == pytest.approx(efficiency, abs=1e-3)
    copies = found.placing(ranks)([1.0, 1.0, 1.0], ranks).copies
    assert copies <= ranks - 1


def test_it_is_said_where_heads_go() -> None:
    assert sharing().describe(4) == "proportional, up to 3 copies a layer, by what they keep"
    assert sharing(placement="static").describe(4) == "static"
    assert sharing(placement="best-effort", profile="a.json").describe(4) == "best-effort, by a.json"


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


def test_what_keeps_heads_together_is_said_or_refused() -> None:
    loaded, why = tiny("llama-gqa"), "documents step one by one"
    assert open_sharing(DecodeSettings(), loaded, why) is None
    assert open_sharing(DecodeSettings(mode="auto"), loaded, why) == why
    with pytest.raises(ConfigError, match=f"cannot be distributed over ranks: {why}; choose mode = 'data-parallel'"):
        open_sharing(DecodeSettings(mode="head-parallel"), loaded, why)
