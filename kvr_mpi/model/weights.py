"""Checks the files of a model's weights before transformers reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvr_mpi.errors import ModelError
from kvr_mpi.model.settings import quantization_of

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Content of a file that git has not downloaded.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Quantization settings of other programs, which transformers does not read.
OTHERS = {"hf_quant_config.json": "NVIDIA ModelOpt", "quantize_config.json": "AutoGPTQ", "quant_config.json": "AWQ"}
# Types of safetensors whose numbers are the weights, and tensors of integers that are no weights: masks and positions
# that old models store, and DeepSeek-V4's table of experts.
PLAIN = {"F64", "F32", "F16", "BF16", "BOOL", "C64"}
FP8 = {"F8_E4M3", "F8_E5M2"}
# What belongs to a quantised weight, and the ends of the names of weights beside it.
_SCALE = re.compile("scale|absmax|SCB|zero")
_END = re.compile("[.:_](weight|qdata|data)$")
_NO_WEIGHTS = re.compile(r"(position_ids|token_type_ids|num_batches_tracked|(attn|attention)\.(masked_)?bias|tid2eid)$")


def check_model_folder(folder: Path) -> None:
    """Raise a `ModelError` if files of a model's folder are pointers of git-LFS, or those of an adapter."""
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} has an adapter_config.json: move the files of the adapter into a folder of its own, and set "
            f"model.adapter"
        )
    check_pointers(folder)


def check_pointers(folder: Path) -> None:
    """Raise a `ModelError` if files are pointers of git-LFS."""
    found = []
    for file in sorted((*folder.glob("*.safetensors"), *folder.glob("*.json"), *folder.glob("*.model"))):
        with file.open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                found.append(file.name)
    if found:
        raise ModelError(
            f"{few(found)} in {folder} are only pointers of git-LFS: their content has not been downloaded; run "
            f"`git lfs pull` in that folder, or download the model with `hf download`"
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights that transformers reads from a folder.

    Raises a `ModelError` if there are none, or if a file of the index is missing.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise ModelError(
            f"the folder {folder} has a config.json but no {WEIGHTS} or {INDEX}; pickled weights (*.bin, *.pt) are "
            f"never loaded, since they can run code: convert them to safetensors"
        )
    files = [folder / name for name in sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(f"{few(missing)} of {INDEX} are not in {folder}: copy or download the model again")
    return files


def check_types(folder: Path, config: Any) -> None:
    """Raise a `ModelError` if weights are quantised, but the configuration or the files do not say how."""
    types = dict(tensor_types(folder))
    if quantization_of(config) is not None:
        _check_scales(types)
        return
    found = [f"{name}: {kind}" for name, kind in types.items() if kind not in PLAIN and not _NO_WEIGHTS.search(name)]
    if found:
        others = [
            f", but {name}, of {program}, which transformers does not read"
            for name, program in OTHERS.items()
            if (folder / name).is_file()
        ]
        raise ModelError(
            f"{len(found)} weights are quantised ({few(found)}), and config.json has no quantization_config"
            f"{''.join(others[:1])}: they would be used without their scales; use the original model, or one in the "
            f"format compressed-tensors"
        )


def _check_scales(types: Mapping[str, str]) -> None:
    """Refuse quantised weights without a scale, which transformers would use as they are."""
    scaled = {name[: match.start()].rstrip("._:") for name in types if (match := _SCALE.search(name))}
    modules = {name.rpartition(".")[0] for name in scaled} | scaled
    found = [
        f"{name}: {kind}"
        for name, kind in types.items()
        if (name not in scaled and kind in FP8 and not _SCALE.search(name) and _END.sub("", name) not in scaled)
        or (kind not in PLAIN | FP8 and name.endswith(".weight") and name.removesuffix(".weight") not in modules)
    ]
    if found:
        raise ModelError(
            f"{len(found)} quantised weights have no scale in the files ({few(found)}): a file is missing, or names "
            f"are wrong; copy or download the model again"
        )


def tensor_types(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and type of every tensor in a model's files."""
    from safetensors import safe_open

    for file in weight_files(folder):
        with safe_open(str(file), framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118  (it is no mapping)
                yield name, str(stream.get_slice(name).get_dtype())


def few(names: Sequence[str]) -> str:
    """List the first names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
