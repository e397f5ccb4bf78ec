"""LoRA adapters, merged into a model's weights when it is loaded.

peft reads and merges them (https://github.com/huggingface/peft). Weights that are only in the file or only in the model
raise an error, where peft would just warn.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvr_mpi.errors import ModelError
from kvr_mpi.model.load import LoadedModel
from kvr_mpi.model.shape import logits_width
from kvr_mpi.model.source import UNREADABLE
from kvr_mpi.model.tokenizer_file import load_tokenizer
from kvr_mpi.model.weights import check_pointers

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Files of a tokenizer, and of a chat template beside none.
TOKENIZERS, TEMPLATE = ("tokenizer.json", "tokenizer.model", "vocab.json"), "chat_template.jinja"


def check_adapter(path: str) -> None:
    """Raise a `ModelError` if a file of a LoRA adapter, or peft, is missing; loads no weights."""
    folder = Path(path).expanduser()
    where = f"model.adapter {path!r}"
    if not folder.is_dir():
        raise ModelError(f"{where}: no such folder (looked for {folder.absolute()}); expected {CONFIG} and {WEIGHTS}")
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{where}: the folder has no {CONFIG}; expected a LoRA adapter as peft saves it")
    check_pointers(folder)
    if not (folder / WEIGHTS).is_file():
        raise ModelError(
            f"{where}: the folder has no {WEIGHTS}; pickled weights (adapter_model.bin) are never loaded, since they "
            f"can run code: save it as safetensors"
        )
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{where}: {CONFIG} cannot be read: {error}; copy it again") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise ModelError(f"{where}: its peft_type is {kind!r}; only 'LORA' adapters are merged")
    if importlib.util.find_spec("peft") is None:
        raise ModelError(f"{where} needs peft; `pip install peft`")


def with_adapter(base: str, adapter: str | None) -> str:
    """Return a model's fingerprint, combined with a hash of its adapter's configuration and weights if it has one."""
    if adapter is None:
        return base
    digest, folder = hashlib.sha256(), Path(adapter).expanduser()
    for name in (CONFIG, WEIGHTS):
        data = (folder / name).read_bytes()
        digest.update(f"{name}:{len(data)}:".encode() + data)
    return hashlib.sha256(f"{base} {digest.hexdigest()}".encode()).hexdigest()


def merge_adapter(loaded: LoadedModel, path: str | None) -> LoadedModel:
    """Add an adapter to a model's weights in place; the fingerprint covers both.

    Raises a `ModelError` if the adapter is for another model, or cannot be read.
    """
    if path is None:
        return loaded
    check_adapter(path)
    folder = str(Path(path).expanduser())
    from peft import PeftModel
    from safetensors import SafetensorError

    where = f"model.adapter {path!r}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # missing weights raise an error below
            adapted = PeftModel.from_pretrained(loaded.model, folder, torch_device=str(loaded.device))
            _check_complete(adapted, Path(folder), where)
            _check_not_tied(adapted, where)
            model = adapted.merge_and_unload(safe_merge=True)
    except (*UNREADABLE, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"{where} does not match the model {loaded.name}: {reason}") from error
    model = model.eval().requires_grad_(False)
    tokenizer = adapter_tokenizer(loaded.tokenizer, path, logits_width(loaded.config))
    return replace(loaded, model=model, tokenizer=tokenizer, fingerprint=with_adapter(loaded.fingerprint, path))


def adapter_tokenizer(base: Any, path: str | None, vocab_size: int) -> Any:
    """Return the tokenizer that an adapter was trained with: its folder's own, or the model's with its chat template.

    vocab_size : number of tokens of the model.

    Raises a `ModelError` if the adapter's tokenizer cannot be loaded, or has more tokens than the model.
    """
    if path is None:
        return base
    folder = Path(path).expanduser()
    if any((folder / name).is_file() for name in TOKENIZERS):
        try:
            found = load_tokenizer(str(folder), local_files_only=True)
        except (*UNREADABLE, ImportError) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ModelError(f"model.adapter {path!r}: its tokenizer cannot be loaded: {reason}") from error
        if len(found) > max(vocab_size, len(base)):
            raise ModelError(
                f"model.adapter {path!r}: its tokenizer has {len(found)} tokens, but the model has {vocab_size}: the "
                f"adapter is for a model with additional tokens; use that model, or merge the adapter yourself"
            )
        if getattr(found, "chat_template", None) is None:
            found.chat_template = getattr(base, "chat_template", None)
        return found
    if (folder / TEMPLATE).is_file():
        found = copy.deepcopy(base)
        found.chat_template = (folder / TEMPLATE).read_text(encoding="utf-8")
        return found
    return base


def _check_complete(adapted: Any, folder: Path, where: str) -> None:
    """Check that the model has exactly the weights of the file."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    stored, placed = load_file(folder / WEIGHTS), get_peft_model_state_dict(adapted)
    strange, missing = stored.keys() - placed.keys(), placed.keys() - stored.keys()
    if strange or missing:
        raise ModelError(
            f"{where}: {len(strange)} of its weights do not belong to the model, and {len(missing)} are missing, "
            f"such as {min(strange | missing)}; the adapter is for another model, or incomplete"
        )
    for name, tensor in stored.items():
        if not placed[name].cpu().to(tensor.dtype).allclose(tensor, rtol=1e-2, atol=1e-2):
            raise ModelError(f"{where}: after loading, {name} differs from the file")


def _check_not_tied(adapted: Any, where: str) -> None:
    """Refuse adapters of tied embeddings: merging would change both the input and the output embedding."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = adapted.get_base_model()
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    plain = [end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends]
    is_tied = all(end is not None for end in plain) and plain[0].weight is plain[1].weight
    if is_tied and any(isinstance(end, BaseTunerLayer) for end in ends):
        raise ModelError(
            f"{where} changes embeddings that the model ties to its output: they cannot be merged separately"
        )
