"""How a model's folder says that it makes embeddings: the files of the library sentence-transformers.

    modules.json                       its modules: Transformer, Pooling, Normalize
    1_Pooling/config.json              the kind of pooling
    config_sentence_transformers.json  texts that precede queries and documents
    sentence_bert_config.json          whether texts are converted to lower case

Source: https://www.sbert.net/docs/sentence_transformer/usage/custom_models.html. What is not supported is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvr_mpi.errors import ModelError
from kvr_mpi.model.source import find_model
from kvr_mpi.plain import parse_json

MODULES, PROMPTS, TEXTS = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
# Kinds of pooling, by the names of newer files and the keys of older ones.
POOLINGS: dict[str, Literal["last", "mean"]] = {
    "lasttoken": "last",
    "mean": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}
# Names of prompts, in the order in which sentence-transformers chooses one.
NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}


@dataclass(frozen=True, slots=True)
class OwnPooling:
    """How a model makes embeddings.

    normalizes : whether they have length 1.
    prompts : text before a query, and before a document.
    """

    pooling: Literal["last", "mean"]
    normalizes: bool
    prompts: Mapping[str, str]


def read_pooling(path: str) -> OwnPooling:
    """Read how a model makes embeddings; `path` is a job's ``model.path``.

    Raises `ModelError` if its files do not say so, or are not supported.
    """
    modules = _read(path, MODULES)
    if modules is None:
        raise ModelError(
            f"model.path {path!r} has no {MODULES}, which says how it makes embeddings: set output.embedding to 'last' "
            f"or 'mean'"
        )
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ModelError(f"model.path {path!r}: {MODULES} is not a list of modules")
    kinds = [str(one.get("type")).rpartition(".")[2] for one in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(
            f"model.path {path!r}: {MODULES} lists {', '.join(kinds)}; supported are Transformer, Pooling and Normalize"
        )
    folder = str(modules[1].get("path"))
    if len(Path(folder).parts) != 1 or folder == "..":
        raise ModelError(f"model.path {path!r}: {MODULES} has the path {folder!r}; expected a folder beside it")
    name = f"{folder}/config.json"
    config = _table(path, name)
    wanted = config.get("pooling_mode")
    asked = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    asked = [wanted] if isinstance(wanted, str) else asked
    if len(asked) != 1 or asked[0] not in POOLINGS:
        raise ModelError(
            f"model.path {path!r}: {name} asks for {' and '.join(asked) or 'no pooling'}; supported are the last token "
            f"and the mean"
        )
    if config.get("include_prompt") is False:
        raise ModelError(f"model.path {path!r}: {name} leaves the prompt out of pooling, which is not supported")
    if _table(path, TEXTS).get("do_lower_case") is True:
        raise ModelError(f"model.path {path!r}: {TEXTS} converts texts to lower case, which is not supported")
    return OwnPooling(POOLINGS[asked[0]], "Normalize" in kinds, _prompts(path))


def _prompts(path: str) -> dict[str, str]:
    """Read the text before a query, and before a document; empty if there is none."""
    config = _table(path, PROMPTS)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(one, str) for one in prompts.values()):
        raise ModelError(f"model.path {path!r}: {PROMPTS} has prompts that are not texts by name")
    default = config.get("default_prompt_name")
    return {
        kind: next((prompts[name] for name in (*names, default) if name in prompts), "")
        for kind, names in NAMES.items()
    }


def _table(path: str, name: str) -> dict[str, Any]:
    """Read a file with an object; empty if there is no such file."""
    found = _read(path, name)
    if found is not None and not isinstance(found, dict):
        raise ModelError(f"model.path {path!r}: {name} is not an object")
    return found or {}


def _read(path: str, name: str) -> Any:
    """Read a JSON file of a model, from its folder, the local cache or the hub; None if there is no such file."""
    from transformers.utils import cached_file

    source = find_model(path)
    if source.gguf_file is not None:
        return None
    found = cached_file(
        source.location,
        name,
        local_files_only=not source.is_hub,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if found is None:
        return None
    try:
        return parse_json(Path(found).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"model.path {path!r}: {name} is not valid JSON ({error}): correct it") from error
