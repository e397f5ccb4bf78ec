"""LoRA adapters: merged as peft merges them, and what is not of the model is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from made_adapters import TARGETS, base_of, quiet, save_adapter
from safetensors.torch import load_file, save_file

from kvr_mpi.cli.ask import _make_job
from kvr_mpi.errors import EXIT_CONFIG, ModelError
from kvr_mpi.model import load_model
from kvr_mpi.model.adapter import WEIGHTS, check_adapter, merge_adapter, with_adapter


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    return save_adapter(base_of(tiny_model_dir), tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def merged(tiny_model_dir: Path, adapter: Path) -> Any:
    """peft's own."""
    from peft import PeftModel

    with quiet():
        return PeftModel.from_pretrained(base_of(tiny_model_dir), adapter).merge_and_unload().eval()


def load(folder: Path, tmp_path: Path) -> Any:
    return load_model(str(folder), dtype="float32", device="cpu", offline=True, cache_dir=tmp_path)


def test_the_weights_are_pefts_own(tiny_model_dir: Path, adapter: Path, merged: Any, tmp_path: Path) -> None:
    base = load(tiny_model_dir, tmp_path)
    before, fingerprint = {name: value.clone() for name, value in base.model.state_dict().items()}, base.fingerprint
    loaded = merge_adapter(base, str(adapter))
    found, truth = loaded.model.state_dict(), merged.state_dict()
    assert found.keys() == truth.keys() and all(torch.equal(found[name], truth[name]) for name in truth)
    changed = {name for name in truth if not torch.equal(before[name], truth[name])}
    assert len(changed) == len(TARGETS) * 3 and type(loaded.model) is type(merged)
    assert loaded.fingerprint == with_adapter(fingerprint, str(adapter)) != fingerprint
    assert with_adapter(fingerprint, None) == fingerprint
    other = spoiled(adapter, tmp_path / "other", "one missing")
    assert with_adapter(fingerprint, str(other)) != loaded.fingerprint


def test_who_asks_about_a_run_with_an_adapter_asks_with_that_adapter(adapter: Path, run_job: Any) -> None:
    run, plain = run_job(1, f"model.adapter={adapter}", "documents.limit=1"), run_job(1, "documents.limit=1")
    assert run.tokens != plain.tokens
    asked = {"runs": (run.folder,), "questions": ("Who?",), "file": None, "documents": (), "output": None}
    spec, _ = _make_job(asked, ())
    assert spec.model.adapter == str(adapter)


@pytest.mark.parametrize("parts", ["tokenizer", "template"])
def test_its_own_tokenizer_and_chat_template_are_used(
    tiny_model_dir: Path, adapter: Path, tmp_path: Path, run_job: Any, parts: str
) -> None:
    """Where it has none, the model's; what is planned is what runs."""
    folder, template = shutil.copytree(adapter, tmp_path / "own"), "{{ messages[0].content }} In short:"
    tokenizer = tf.AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = template
    if parts == "tokenizer":
        tokenizer.save_pretrained(folder)
    else:
        (folder / "chat_template.jinja").write_text(template)
    base = load(tiny_model_dir, tmp_path)
    assert base.tokenizer.chat_template not in (None, template)
    assert merge_adapter(base, str(folder)).tokenizer.chat_template == template
    alike = (f"model.adapter={adapter}", "prompt.template={text} In short:", "prompt.chat_template=false")
    own, wanted = (f"model.adapter={folder}", "prompt.template={text}"), run_job(1, *alike, "documents.limit=2")
    run = run_job(1, *own, "documents.limit=2", "parallel.ranks_per_chain=auto")
    assert run.tokens == wanted.tokens and "those in the folder of model.adapter" in run.log
    if parts == "tokenizer":
        tokenizer.add_tokens([f"<more-{number}>" for number in range(9)])
        tokenizer.save_pretrained(folder)
        with pytest.raises(ModelError, match="model.adapter .*its tokenizer has .* tokens"):
            merge_adapter(load(tiny_model_dir, tmp_path), str(folder))


def spoiled(adapter: Path, folder: Path, change: str) -> Path:
    """A copy of an adapter that is not as it should be."""
    shutil.copytree(adapter, folder)
    weights, config = load_file(folder / WEIGHTS), json.loads((folder / "adapter_config.json").read_text())
    names = sorted(weights)
    if change == "one missing":
        del weights[names[0]]
    elif change == "one more":
        weights[names[0].replace("layers.0.", "layers.7.")] = weights[names[0]].clone()
    elif change == "other size":
        weights[names[0]] = torch.zeros(4, 99)
    elif change == "other layers":
        config["target_modules"] = ["nowhere_proj"]
    elif change == "other kind":
        config["peft_type"] = "PREFIX_TUNING"
    save_file(weights, folder / WEIGHTS)
    (folder / "adapter_config.json").write_text("{" if change == "no json" else json.dumps(config))
    if change == "pickled":
        (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("one missing", "such as base_model.model.model.layers.0"),
        ("one more", "such as base_model.model.model.layers.7"),
        ("other size", "does not match the model"),
        ("other layers", "does not match the model"),
        ("other kind", "its peft_type is 'PREFIX_TUNING'"),
        ("no json", "cannot be read"),
        ("pickled", "pickled weights"),
    ],
)
def test_what_is_no_adapter_of_this_model_is_refused(
    tiny_model_dir: Path, adapter: Path, tmp_path: Path, run_job: Any, change: str, said: str
) -> None:
    """What is no adapter at all, before anything is loaded."""
    folder = spoiled(adapter, tmp_path / "spoiled", change)
    if "such as" in said or "match" in said:
        with pytest.raises(ModelError, match="model.adapter .*" + said):
            merge_adapter(load(tiny_model_dir, tmp_path), str(folder))
        return
    log = run_job(1, f"model.adapter={folder}", code=EXIT_CONFIG).log
    assert said in log and "loading" not in log


def test_tied_embeddings_and_a_missing_library_are_named(
    tokenizer: Any, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tf.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    folder = tmp_path / "tied"
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    made = save_adapter(base_of(folder), tmp_path / "head", target_modules=["lm_head"])
    with pytest.raises(ModelError, match="ties to its output"):
        merge_adapter(load(folder, tmp_path), str(made))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install peft"):
        check_adapter(str(adapter))
