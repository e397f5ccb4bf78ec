"""The reference, written from the code into blocks of the pages: ``make docs``.

python docs/reference.py            write the blocks
python docs/reference.py --check    write nothing; exit code 1 if a block differs from the code

A block stands between ``<!-- reference: NAME -->`` and ``<!-- end of reference -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvr_mpi import errors
from kvr_mpi.cli import COMMANDS
from kvr_mpi.job import JobSpec
from kvr_mpi.job.combinations import MODELS, NO_EFFECT, REFUSED, Rule
from kvr_mpi.scheduler import SCHEDULERS
from kvr_mpi.store import kv, log, record, volumes

DOCS = Path(__file__).resolve().parent
# A block that the code writes, and its name.
BLOCK = re.compile(r"<!-- reference: (?P<name>[a-z-]+) -->\n.*?<!-- end of reference -->", re.DOTALL)
# TOML's names for JSON Schema's types.
TYPES = {"string": "string", "integer": "integer", "number": "number", "boolean": "boolean", "object": "table"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}

# Variables that users set, by reader, with their meanings. Variables in which launchers and SLURM describe a process
# are not included.
VARIABLES: dict[str, dict[str, str]] = {
    "commands": {
        "KVR_SECTION__KEY": "sets a key of the job, such as `KVR_GENERATION__SEED=7`; overrides the job file, but not "
        "`--set`; unknown ones are refused",
        "KVR_CACHE": "folder for converted models, compiled kernels and their measurements; default: `kvr-mpi` in "
        "`XDG_CACHE_HOME` or `~/.cache`",
        "KVR_LOCAL": "local folder on each node for compiled kernels and converted models, in a private subfolder; "
        "default in a batch job: `SLURM_TMPDIR`, `TMPDIR` or `/tmp`",
        "KVR_CHECK": "1: check at the end of a job that every prompt's keys and values were freed (for developers)",
        "KVR_PEER_TIMEOUT": "seconds without a heartbeat from a rank, or its part of a sum, after which the job ends "
        "with code 69; default: 600",
        "XDG_CONFIG_HOME": "folder whose `kvr-mpi/sbatch.toml` has defaults for `kvr sbatch`; default: `~/.config`",
        "XDG_CONFIG_DIRS": "the same for a site's defaults; default: `/etc/xdg`",
        "CXX": "the C++ compiler for the attention kernels of CPUs, with options if needed; default: `c++`, `g++` "
        "or `clang++`",
        "OMP_NUM_THREADS": "CPU threads per rank; default: its share of the cores or the CPU quota",
        "HF_HUB_OFFLINE": "1: use only local files of models, the default in a batch job; 0: ask the hub",
        "KVR_END_TIME": "end of the job (Unix time), unless `--time-limit` is given; default: "
        "`SLURM_JOB_END_TIME`, set by SLURM or the job script",
        "CUDA_MODULE_LOADING": "default here: `EAGER`, so that no kernel is loaded while a transfer waits",
        "TORCH_CPP_LOG_LEVEL": "default here: `ERROR`; torch would warn about each pair of ranks that NCCL connects",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "default here: 64; with 1024, memory use grows with the number "
        "of different prompt lengths",
    },
    "job scripts": {
        "KVR_SITE": "the site file; default: `site.sh` next to the scripts",
        "KVR_VENV": "the virtual environment to activate; default: the checkout's `.venv`, if `kvr` is not found",
        "KVR_CONTAINER": "prefix for every command, such as `apptainer exec --nv kvr.sif`",
        "KVR_ENVIRONMENT_FILE": "environment in one file, as for `kvr sbatch --environment-file`",
        "KVR_MPI_TYPE": "value for `srun --mpi=`; default: the type for the MPI that mpi4py loads",
        "KVR_LAUNCHER": "launcher to use instead of `srun`, with its options, such as `mpirun`",
        "KVR_SHARES": "number of shares into which `kvr_array.sh` splits the corpus; default: one per task",
        "KVR_CTAS": "thread blocks per NCCL transfer that `kvr_gpu.sh` tries; default: `1 2 4 8 16`",
        "KVR_MAX_REQUEUES": "maximum number of requeues of a job that stops early; default: 20",
        "KVR_SLURM_DIR": "folder of the scripts; default: that of the script submitted to SLURM",
    },
    "libraries": {
        "HF_HOME": "cache for models from the hub; download them on a login node",
        "CUDA_VISIBLE_DEVICES": "visible GPUs; each rank uses the one with the fewest lower ranks",
        "MPICH_GPU_SUPPORT_ENABLED": "1: Cray MPICH accepts GPU memory",
        "NCCL_GRAPH_REGISTER": "default here: `0`; NCCL's registered buffers do not suit torch's expandable segments",
        "NCCL_MAX_CTAS": "thread blocks on the GPU for an NCCL transfer; default here: 4",
    },
}


def commands() -> str:
    """List the commands, each with its line in `kvr --help`."""
    rows = [(f"`kvr {name}`", about) for name, about in COMMANDS.items()]
    return _table(("command", "what it does"), rows)


def exit_codes() -> str:
    """List the exit codes, with the errors that end with each."""
    rows = []
    for code, meaning in sorted(errors.MEANINGS.items()):
        found = [kind for kind in _kinds(errors.KvrError) if kind.exit_code == code]
        meanings = dict.fromkeys([meaning, *(kind.meaning for kind in found if kind.meaning)])
        rows.append((str(code), "; or ".join(meanings), ", ".join(f"`{kind.__name__}`" for kind in found)))
    return _table(("code", "meaning", "Python errors"), rows)


def environment() -> str:
    """List the environment variables, by who reads them."""
    about = {"commands": "Commands and Python", "job scripts": "Job scripts", "libraries": "Libraries"}
    parts = []
    for of, variables in VARIABLES.items():
        rows = [(f"`{name}`", meaning) for name, meaning in variables.items()]
        parts += [f"### {about[of]}", _table(("variable", "meaning"), rows)]
    return "\n\n".join(parts)


# Keys that most jobs never set, listed after the others.
EXPERT = """
model.kernels model.trust_remote_code documents.shard documents.reuse prompt.overlap_tokens prompt.reduce_template
generation.min_p generation.min_new_tokens cache.tokens compress.observes compress.window compress.profile
decode.placement parallel.partition parallel.chunk_tokens parallel.memory_gib parallel.transport
""".split()


def schedulers() -> str:
    """List the batch systems and the variables that they set in a job."""
    head = ("batch system", "job", "restarts", "number in an array", "end")
    rows = [
        (
            one.name,
            ", ".join(map(_code, one.job)),
            *(f"`{name}`" if name else "" for name in (one.restarts, one.task, one.end)),
        )
        for one in SCHEDULERS
    ]
    return _table(head, rows)


def job_keys() -> str:
    """List every key of a job: its type, its default, and what it is; those of experts last."""
    whole = JobSpec.model_json_schema()
    parts, rare = [], []
    for name, section in whole["properties"].items():
        kind = re.findall(r'"#/\$defs/(\w+)"', json.dumps(section))[0]
        table = whole["$defs"][kind]
        needed = table.get("required", ())
        rows = []
        for key, about in table["properties"].items():
            is_rare = f"{name}.{key}" in EXPERT
            told = _type(about), _default(about, key in needed), about.get("description", "")
            (rare if is_rare else rows).append((f"`{name}.{key}`" if is_rare else f"`{key}`", *told))
        head = f"[[{name}]]" if section.get("type") == "array" else f"[{name}]"
        # A docstring names code for those who read code.
        what = re.sub(r" \(`[^`]*`\)", "", table["description"].splitlines()[0])
        parts += [f"### `{head}`", _filled(what), _table(("key", "type", "default", "meaning"), rows)]
    parts += ["### Keys for experts", _table(("key", "type", "default", "meaning"), rare)]
    return "\n\n".join(parts)


def combinations() -> str:
    """List the settings that a job cannot combine."""
    return _table(("setting", "cannot be combined with", "why"), _rows_of(REFUSED))


def no_effect() -> str:
    """List the settings that have no effect beside others."""
    return _table(("setting", "has no effect with", "why"), _rows_of(NO_EFFECT))


def _rows_of(rules: Iterable[Rule]) -> list[tuple[str, str, str]]:
    """Return a row for each rule; those with the same other settings and reason share one."""
    settings: dict[tuple[str, str], list[str]] = {}
    for rule in rules:
        settings.setdefault((", ".join(map(_code, rule.others)), rule.why), []).append(_code(rule.setting))
    return [(", ".join(dict.fromkeys(names)), others, why) for (others, why), names in settings.items()]


def schema() -> str:
    """Draw what is where in the files of results."""
    return "\n\n".join(
        [
            f"Version {log.SCHEMA_VERSION}. Files:",
            _drawing(volumes),
            "Lines of a log:",
            _drawing(log),
            "A record; `pieces`, in lines only, has the ids of its keys and values:",
            _fields(record.MEANINGS),
            "Keys and values, with `output.kv`:",
            _drawing(kv),
        ]
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "combinations": combinations,
    "commands": commands,
    "environment": environment,
    "exit-codes": exit_codes,
    "job-keys": job_keys,
    "no-effect": no_effect,
    "schedulers": schedulers,
    "schema": schema,
}


def render_page(text: str) -> str:
    """Put into each block of a page what the code says.

    Raises
    ------
    SystemExit
        If a block has a name that is not in `BLOCKS`.
    """

    def replace(block: re.Match[str]) -> str:
        name = block["name"]
        if name not in BLOCKS:
            raise SystemExit(f"a page has a block {name!r}; expected one of {', '.join(BLOCKS)}")
        return f"<!-- reference: {name} -->\n{BLOCKS[name]()}\n<!-- end of reference -->"

    return BLOCK.sub(replace, text)


def differing() -> list[Path]:
    """Find the pages with a block that differs from the code."""
    texts = {page: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}
    return [page for page, text in texts.items() if render_page(text) != text]


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def _code(name: str) -> str:
    """Write a setting as code, and what a model is in words."""
    return name if name in MODELS else f"`{name}`"


def _drawing(module: ModuleType) -> str:
    """Take from a module's docstring what is indented in it: the groups, datasets and attributes it is about."""
    found = re.search(r"^(?: {4}.*\n+)+", module.__doc__ or "", re.MULTILINE)
    assert found is not None, f"{module.__name__}: its docstring draws nothing"
    return _block(textwrap.dedent(found[0]).replace("``", ""))


def _fields(meanings: Mapping[str, str]) -> str:
    """List fields and their meanings."""
    width = max(map(len, meanings)) + 2
    lines = [f"{name:{width}}{what}".rstrip() for name, what in meanings.items()]
    return _block("\n".join(textwrap.fill(line, 75, subsequent_indent=width * " ") for line in lines))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, *rows]
    cells = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
    return "\n".join([cells[0], "|" + "---|" * len(heads), *cells[1:]])


def _kinds(kind: type[errors.KvrError]) -> Iterator[type[errors.KvrError]]:
    """Walk through a family of errors, each before its own."""
    yield kind
    for one in kind.__subclasses__():
        if one.__module__ == errors.__name__:
            yield from _kinds(one)


def _type(about: Mapping[str, Any]) -> str:
    """Say in words what JSON Schema says of a value."""
    if "anyOf" in about:
        return " or ".join(_type(one) for one in about["anyOf"] if one.get("type") != "null")
    values = about.get("enum") or ([about["const"]] if "const" in about else [])
    if values:
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    if about["type"] == "array":
        return f"list of {_type(about['items']).replace('number', 'numbers')}"
    bounds = [f"{words} {about[name]:g}" for name, words in BOUNDS.items() if name in about]
    return f"{TYPES[about['type']]} {', '.join(bounds)}".rstrip()


def _default(about: Mapping[str, Any], needed: bool) -> str:
    """Write a default as TOML has it; nothing if the key is left out by default."""
    if needed:
        return "(required)"
    value = about.get("default")
    return "" if value is None else f"`{json.dumps(value)}`"


def main() -> int:
    """Do what the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page differs")
    check = parser.parse_args().check
    wrong = differing()
    for page in wrong:
        if not check:
            page.write_text(render_page(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"docs/{page.name}: {'differs from the code: run `make docs`' if check else 'written'}")
    return 1 if check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
