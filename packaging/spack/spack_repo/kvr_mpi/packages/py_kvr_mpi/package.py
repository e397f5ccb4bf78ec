# SPDX-License-Identifier: Apache-2.0
"""Builds the checkout that this file lies in, with the site's MPI (docs/clusters.md).

What it asks for is pyproject.toml's; tests/test_package.py holds one against the other.
"""

from pathlib import Path

from spack.package import default_args, depends_on, license, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyKvrMpi(PythonPackage):
    """Long-document LLM batch work over MPI: prefill one prompt over a chain of ranks (KV-Runahead)."""

    git = Path(__file__).resolve().parents[6].as_uri()

    license("Apache-2.0")

    version("main", branch="main")

    variant("gguf", default=True, description="Models in GGUF files")
    variant("json", default=False, description="Answers by a JSON schema")
    variant("lora", default=False, description="LoRA adapters")
    variant("parquet", default=True, description="Documents in Parquet files")
    variant("zstd", default=False, description="Documents in .zst files")
    variant("sentencepiece", default=False, description="Models with only a SentencePiece tokenizer")

    depends_on("python@3.11:3.13", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    # mpi4py is built with the site's MPI by its own recipe.
    with default_args(type=("build", "run")):
        depends_on("py-click@8.1:")
        depends_on("py-fsspec@2025.5:")
        depends_on("py-h5py@3.12:")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-numpy@2.0:")
        depends_on("py-pydantic@2.10:")
        depends_on("py-rich@13:")
        depends_on("py-scipy@1.14:")
        depends_on("py-torch@2.13:")
        depends_on("py-transformers@5.23")
        depends_on("py-xxhash@3.5:")

        depends_on("py-gguf@0.17:", when="+gguf")
        depends_on("py-accelerate@1.0:", when="+gguf")
        depends_on("py-llguidance@1.3:", when="+json")
        depends_on("py-peft@0.18:", when="+lora")
        depends_on("py-pyarrow@18:", when="+parquet")
        depends_on("py-zstandard@0.23:", when="+zstd")
        depends_on("py-sentencepiece@0.2:", when="+sentencepiece")
        depends_on("py-protobuf@3.20:", when="+sentencepiece")
