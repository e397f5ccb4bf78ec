"""`kvr verify` as a user runs it, and what it finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_jobs import with_settings
from models import CONFIGS, random_model, tiny

from benchmarks.architectures import Entry, build
from kvr_mpi.cli.options import load_model_job
from kvr_mpi.decode.group import Group
from kvr_mpi.errors import EXIT_CONFIG, ConfigError, ModelError
from kvr_mpi.kv import chain as layer_module
from kvr_mpi.kv.row import Row
from kvr_mpi.kv.sequence import SequenceKV
from kvr_mpi.prefill import exactness
from kvr_mpi.prefill.self_check import check_chain
from kvr_mpi.runtime.verify import verify
from kvr_mpi.store.kv_reader import KVReader
from kvr_mpi.transport.local import LocalTransport, run_local

OTHERS = "3 prompts in a row", "stored, and continued"


@pytest.mark.slow
def test_verify_holds_on_real_ranks(tiny_model_dir: Path, mpirun: Any, kvr: Path) -> None:
    """Of lengths up to the model's context, less 32 tokens, whatever the default is."""
    settings = with_settings(f"model.path={tiny_model_dir}", "model.dtype=float32")
    run = mpirun(3, [kvr, "verify", *settings])
    assert run.returncode == 0, run.stderr
    assert "14 of 14 checks passed on 3 ranks" in run.stderr and "480 tokens, even" in run.stderr
    run = mpirun(3, [kvr, "verify", *settings, "--lengths", "5,context"])
    assert run.returncode == EXIT_CONFIG and "lengths [5, 480]: expected from 6" in run.stderr


@pytest.mark.parametrize("setting", ["model.adapter=lora", "parallel.tensor_parallel=2"])
def test_what_is_not_the_model_of_the_job_is_not_passed_for_it(setting: str, tmp_path: Path) -> None:
    (job := tmp_path / "job.toml").write_text('model.path = "m"\ndocuments.path = "d"\noutput.path = "o"\n')
    assert load_model_job(job, ()).model.path == "m"
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        load_model_job(job, (setting,))


@pytest.mark.parametrize("broken", [False, True])
def test_verify_notices_a_lost_token(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = layer_module.attend

    def forgetful(query: Any, keys: Any, values: Any, scores: Any, *, causal: bool = False, **how: Any) -> Any:
        # Leaves out the first token of every stretch before the own slice or chunk; answers are decoded from all.
        before = keys.shape[2] - query.shape[2] if causal else keys.shape[2]
        if before and 1 < keys.shape[2] < 40:
            keys, values = keys[:, :, 1:], values[:, :, 1:]
        return attend(query, keys, values, scores, causal=causal, **how)

    if broken:
        monkeypatch.setattr(layer_module, "attend", forgetful)
    loaded = tiny("llama-gqa")
    first, second = run_local(2, lambda rank: list(verify(loaded, rank, [40])))
    assert first == second and len(first) == 7
    held = {found.slices: found.holds for found in first if "token" not in found.slices}
    of_chains = [holds for slices, holds in held.items() if slices not in OTHERS]
    assert len(of_chains) == 4 and set(of_chains) == {not broken}


def test_verify_decodes_as_jobs_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode batch that forgets the newest tokens is noticed, after every prefill."""
    attend = Row.attend

    def forgetful(row: Row, *given: Any) -> Any:
        lengths, row.lengths = row.lengths, [max(1, length - 3) if row.is_step else length for length in row.lengths]
        try:
            return attend(row, *given)
        finally:
            row.lengths = lengths

    monkeypatch.setattr(Row, "attend", forgetful)
    findings = run_local(2, lambda rank: list(verify(tiny("llama-gqa"), rank, [40])))[0]
    assert len(findings) == 7 and not any(finding.holds for finding in findings)


@pytest.mark.parametrize("place", ["row", "stored"])
def test_verify_notices_wrong_rows_and_stored_prompts(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "row":
        attend = Row.attend

        def crossed(row: Row, *given: Any) -> torch.Tensor:
            out = attend(row, *given)
            return out if row.is_step else out.roll(1, dims=2)

        monkeypatch.setattr(Row, "attend", crossed)
    else:
        read = KVReader.read
        monkeypatch.setattr(KVReader, "read", lambda *given: tuple(part.flip(0) for part in read(*given)))
    found = {one.slices: one.holds for one in verify(tiny("llama-gqa"), LocalTransport(), [40])}
    assert [name for name, holds in found.items() if not holds] == [OTHERS[place == "stored"]]


def test_verify_fails_where_transformers_itself_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any dtype, although both sides of the comparison are the same."""
    for dtype in (torch.float32, torch.bfloat16):
        loaded = random_model(CONFIGS["llama-gqa"](), dtype)
        with torch.no_grad():
            loaded.model.model.layers[2].mlp.down_proj.weight.fill_(float("inf"))
        findings = list(verify(loaded, LocalTransport(), [40]))
        assert findings and not any(finding.holds for finding in findings)
        with pytest.raises(ModelError, match=f"not finite .* in {str(dtype).removeprefix('torch.')}"):
            check_chain(loaded)


@pytest.mark.parametrize("name", ["mamba2", "bart"])
def test_verify_runs_models_without_keys_or_positions(name: str) -> None:
    loaded = check_chain(random_model(build(Entry(name, name)).config))
    findings = run_local(2, lambda rank: list(verify(loaded, rank, [40])))[0]
    assert findings and all(finding.holds for finding in findings)


@pytest.mark.parametrize("layer", [0, 1, 2, None])
def test_verify_notices_nan_in_any_layer_and_another_token(layer: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, copied, run = tiny("llama-gqa"), exactness.copy_layers, Group.run

    def with_nan(cache: Any) -> Any:
        layers = copied(cache)
        if isinstance(cache, SequenceKV):
            layers[layer]["keys"][3] = float("nan")
        return layers

    def other(group: Group, documents: Any) -> torch.Tensor:
        return run(group, documents).roll(1, -1)

    if layer is None:  # of a chain whose keys and values are right
        monkeypatch.setattr(Group, "run", other)
    else:
        monkeypatch.setattr(exactness, "copy_layers", with_nan)
        monkeypatch.setattr("kvr_mpi.runtime.verify.copy_layers", with_nan)
    findings = run_local(2, lambda rank: list(verify(loaded, rank, [40])))[0]
    assert findings and not any(finding.holds for finding in findings)
    if layer is not None:
        with pytest.raises(ModelError, match=f"keys of layer {layer} differ"):
            check_chain(loaded)
