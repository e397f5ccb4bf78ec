"""Identities recorded in tables: model, devices and software."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash

from kvr_mpi.errors import counted
from kvr_mpi.model import LoadedModel
from kvr_mpi.transport import Transport, gather_json, share_json
from kvr_mpi.tuning.table import ModelIdentity, Provenance, TableKey

LIBRARIES = ("kvr-mpi", "torch", "transformers", "mpi4py")
CPUINFO = Path("/proc/cpuinfo")
RESTRICTING = (
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    *(f"{name}_{what}" for name in ("ONEDNN", "DNNL") for what in ("MAX_CPU_ISA", "DEFAULT_FPMATH_MODE")),
)


def table_key(loaded: LoadedModel, chain: Transport) -> TableKey:
    """Return the key of a table measured on these ranks; every rank calls this and gets the same key."""
    device = devices_of(loaded, chain)
    return TableKey(
        model=model_identity(loaded),
        dtype=str(loaded.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        hardware=re.sub(r"[^A-Za-z0-9.]+", "-", device).strip("-.")[:60].strip("-.") or "unknown",
        device=device,
        ranks=chain.size,
    )


def model_identity(model: LoadedModel) -> ModelIdentity:
    """Return the identity of a model in tables."""
    return ModelIdentity(name=model.name[-1000:], fingerprint=model.fingerprint, architecture=model.shape.architecture)


def devices_of(loaded: LoadedModel, ranks: Transport) -> str:
    """Name the kinds of devices of all ranks; every rank calls this and gets the same text."""
    devices = share_json(ranks, gather_json(ranks, _device(loaded)))
    return "; ".join(dict.fromkeys(devices))[:1000]


def provenance_of(chain: Transport, command: str, mpi: str) -> Provenance:
    """Return the origin of measurements; every rank calls this and gets the same result."""
    hosts = share_json(chain, gather_json(chain, socket.gethostname()))
    versions = {name: _version(name) for name in LIBRARIES}
    return Provenance(
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        hosts=list(dict.fromkeys(hosts)),
        processor=processor_name(),
        command=command[:1000],
        versions={"python": platform.python_version(), **versions, "mpi": mpi[:1000] or "none"},
    )


def processor_key(environ: Mapping[str, str] = os.environ) -> str:
    """Identify a processor for compiled code and timings: model, instruction sets, and their restrictions.

    Environment variables (`RESTRICTING`) can disable instruction sets in torch, oneDNN and MKL, or reduce precision.
    """
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    restricted = [f"{name}={value}" for name in RESTRICTING if (value := environ.get(name))]
    present = sorted(flags.group(1).split()) if flags else []
    known = " ".join([*present, torch.backends.cpu.get_cpu_capability(), *restricted])
    return f"{processor_name()} {xxhash.xxh3_64_hexdigest(known.encode())}"


def _device(loaded: LoadedModel) -> str:
    if loaded.device.type == "cuda":
        return torch.cuda.get_device_name(loaded.device)
    return f"{processor_name()}, {counted(torch.get_num_threads(), 'thread')}"


def processor_name() -> str:
    """Return the processor's name, from /proc/cpuinfo if possible."""
    found = re.search(r"^(?:model name|cpu model|Model)\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    name = found.group(1) if found else platform.processor() or platform.machine() or "unknown processor"
    return " ".join(name.split())[:200]


def _cpuinfo() -> str:
    try:
        return CPUINFO.read_text(errors="replace")
    except OSError:
        return ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
