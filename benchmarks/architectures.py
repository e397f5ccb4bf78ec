"""Every architecture of transformers' causal-LM mapping, and variants, each tiny and random and of a class.

``python -m benchmarks.architectures NAME ...`` judges the entries of these names in this process, and prints a line
of JSON for each; ``python -m benchmarks architectures`` has several such processes at work (``survey``).
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvr_mpi.errors import ConfigError

FAST, GENERIC, REFUSED = "exact (fast)", "exact (generic)", "refused"
NOT_HERE, WRONG, TRACEBACK = "not instantiable here", "WRONG", "TRACEBACK"
CLASSES = (FAST, GENERIC, REFUSED, NOT_HERE, WRONG, TRACEBACK)
BAD = (WRONG, TRACEBACK)
BEGINS = "begins: "  # on standard error, before each strategy: if the process dies, its last


@dataclass(frozen=True, slots=True)
class Entry:
    """A configuration of the catalogue: a model type, and what is changed in its small configuration."""

    name: str
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def is_variant(self) -> bool:
        """Whether it is none of the mapping itself."""
        return self.name != self.model_type


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of an entry.

    kind : one of `CLASSES`.
    exact, refused : strategies; these with their reasons.
    """

    name: str
    model_type: str
    architecture: str
    kind: str
    reason: str
    exact: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> str:
        values = asdict(self)
        return json.dumps({"class" if name == "kind" else name: value for name, value in values.items()})

    @classmethod
    def from_json(cls, line: str) -> Verdict:
        values = json.loads(line)
        return cls(kind=values.pop("class"), **values)


def catalogue() -> dict[str, Entry]:
    """All entries of the mapping, then variants, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from benchmarks.variants import variants

    entries = [Entry(name, name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    entries += [Entry(name, model_type, changes) for name, (model_type, changes) in variants().items()]
    return {entry.name: entry for entry in entries}


def choose(entries: dict[str, Entry], only: Sequence[str]) -> list[str]:
    """Choose entries: those of the names, or all.

    Raises
    ------
    ConfigError
        If a name is none of the catalogue's.
    """
    unknown = [name for name in only if name not in entries]
    if unknown:
        like = [name for name in entries if any(name.startswith(each.split(" ")[0][:4]) for each in unknown)]
        raise ConfigError(
            f"--only {', '.join(unknown)}: not one of the {len(entries)} entries; expected a model type of "
            f"transformers or the name of a variant{': perhaps ' + ', '.join(like[:12]) if like else ''}"
        )
    return list(only or entries)


def build(entry: Entry) -> Any:
    """Build an entry's model with random weights; what begins as ones or zeros is shaken, so that it counts, too."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.tiny import shrink

    torch.manual_seed(0)
    config = shrink(entry.model_type, **entry.changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def judge(entry: Entry) -> Verdict:
    """Build an entry, compare it, and say of what class it is."""
    from benchmarks.exactness import NotHereError, compare, describe

    began, architecture = time.perf_counter(), ""
    exact: list[str] = []
    refused: dict[str, str] = {}
    try:
        _tell("building")
        model = build(entry)
        architecture = type(model).__name__
    except Exception as error:
        kind, reason = NOT_HERE, describe(error)
    else:
        try:
            found = compare(model, _tell)
        except NotHereError as error:
            kind, reason = NOT_HERE, str(error)
        except Exception as error:
            kind, reason = TRACEBACK, describe(error)
        else:
            (kind, reason), exact, refused = classify(found), found.exact, found.refused
    seconds = round(time.perf_counter() - began, 1)
    return Verdict(entry.name, entry.model_type, architecture, kind, reason, exact, refused, seconds)


def _tell(name: str) -> None:
    print(f"{BEGINS}{name}", file=sys.stderr, flush=True)


def classify(found: Any) -> tuple[str, str]:
    """Say of what class `Findings` are, and why."""
    from benchmarks.exactness import CHAIN

    late = {name: f"refused after its self-check: {text}" for name, text in found.refused.items() if "chain " in name}
    failed = found.failed | late
    reasons = [f"{name}: {text}" for name, text in (found.wrong | failed).items()]
    if reasons:
        return (WRONG if found.wrong else TRACEBACK), "; ".join(reasons)
    if CHAIN in found.refused:
        return REFUSED, found.refused[CHAIN]
    return (FAST if found.is_fast else GENERIC), ""


def judge_here(names: Sequence[str]) -> None:
    """Judge entries in this process, all if none is named."""
    import torch
    import transformers

    warnings.filterwarnings("ignore")  # tiny models are no good models, and transformers says so
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    entries = catalogue()
    for name in names or entries:
        print(judge(entries[name]).as_json(), flush=True)


if __name__ == "__main__":
    judge_here(sys.argv[1:])
