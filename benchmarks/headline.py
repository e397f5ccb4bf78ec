"""The docs' headline tables, first tokens in bfloat16 and in float32 of ours and of every rival, part by part.

A part is one model in one dtype with some rivals, each in pairs with ours. Its rows are kept in a folder, so that a
run that was stopped, or had no more time, goes on with the next part. In the end all parts become two measurements in
``docs/data``, and the tables of the pages.

    python -m benchmarks headline                              as many parts as 12 minutes allow, most important first
    python -m benchmarks headline --minutes 40                 the others, too
    python -m benchmarks headline --only smollm2-vllm --again  one part, measured anew
    python -m benchmarks headline --minutes 0                  write the tables from the parts that there are
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.options import make_parser
from kvr_mpi.cli.options import DEFAULT_MODEL
from kvr_mpi.disk import replacing
from kvr_mpi.errors import ConfigError, counted
from kvr_mpi.tuning.identity import processor_name

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "data"
OURS = "kvr-s"
# A part is ended after so many times the expected seconds, and two minutes.
SLOWER = 4.0
# The code whose change makes a part old.
MEASURES = ["kvr_mpi/kv", "kvr_mpi/model", "kvr_mpi/prefill", "kvr_mpi/transport", "benchmarks/first_token.py"]
MODELS = {
    DEFAULT_MODEL: "SmolLM2-135M",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B",
    "gemma-3-270m": "Gemma-3-270M",
    "random-llama-3.2-1b": "Llama-3.2-1B, random",
}
LABELS = {
    OURS: "kvr-mpi",
    "single": "transformers",
    "ring": "ring",
    "ring-lent": "ring with our kernels",
    "openvino": "OpenVINO",
    "llama.cpp": "llama.cpp",
    "vllm": "vLLM",
}


@dataclass(frozen=True, slots=True)
class Part:
    """What one process measures.

    others : strategies and engines beside ours.
    pairs : of each with ours.
    seconds : that it takes on two cores of a Zen 1, about.
    """

    name: str
    dtype: str
    model: str
    tokens: int
    others: tuple[str, ...]
    pairs: int
    seconds: int


# In this order, as far as time allows.
PARTS = (
    Part("smollm2", "bfloat16", DEFAULT_MODEL, 1024, ("openvino", "ring-lent"), 5, 150),
    Part("smollm2-transformers", "bfloat16", DEFAULT_MODEL, 1024, ("single",), 1, 130),
    Part("smollm2-float32", "float32", DEFAULT_MODEL, 1024, ("single", "openvino"), 3, 100),
    Part("qwen", "bfloat16", "qwen2.5-coder-0.5b", 512, ("openvino", "ring-lent"), 2, 120),
    Part("smollm2-llama.cpp", "bfloat16", DEFAULT_MODEL, 1024, ("llama.cpp",), 2, 80),
    Part("gemma", "bfloat16", "gemma-3-270m", 1024, ("ring-lent", "llama.cpp"), 1, 100),
    Part("smollm2-ring", "bfloat16", DEFAULT_MODEL, 1024, ("ring",), 1, 130),
    Part("smollm2-long", "bfloat16", DEFAULT_MODEL, 4096, ("openvino", "ring-lent"), 2, 250),
    Part("llama", "bfloat16", "random-llama-3.2-1b", 256, ("ring-lent",), 2, 120),
    Part("smollm2-vllm", "bfloat16", DEFAULT_MODEL, 1024, ("vllm",), 1, 170),
    Part("smollm2-float32-ring", "float32", DEFAULT_MODEL, 1024, ("ring", "ring-lent"), 3, 90),
    Part("smollm2-float32-long", "float32", DEFAULT_MODEL, 4096, ("openvino", "single"), 2, 250),
    Part("smollm2-float32-llama.cpp", "float32", DEFAULT_MODEL, 1024, ("llama.cpp",), 2, 80),
    Part("qwen-llama.cpp", "bfloat16", "qwen2.5-coder-0.5b", 512, ("llama.cpp", "single"), 1, 250),
)


def main(arguments: Sequence[str]) -> int:
    """Measure parts, and write the tables."""
    parser = make_parser("headline", __doc__)
    parser.add_argument("--minutes", type=float, default=12.0, help="begin no part that would end later (%(default)s)")
    parser.add_argument("--only", default="", metavar="NAMES", help="these parts; --list names all")
    parser.add_argument("--again", action="store_true", help="measure parts that have been measured")
    parser.add_argument("--list", action="store_true", help="list the parts, and which have been measured")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "headline", help="of the parts (%(default)s)")
    parser.add_argument("--rivals-folder", type=Path, default=ROOT / ".rivals", help="as in first-token")
    parser.add_argument("--ranks", type=int, default=2, help="of ours (%(default)s)")
    parser.add_argument("--tokens", type=int, help="instead of each part's prompt length, for a trial")
    parser.add_argument("--machine", default="", help="said of the machine in the docs, beside what is found out")
    parser.add_argument("--no-store", action="store_true", help="do not write docs/data and the pages")
    given = parser.parse_args(arguments)
    names = [name for name in given.only.split(",") if name]
    if unknown := set(names) - {part.name for part in PARTS}:
        raise ConfigError(f"--only {sorted(unknown)}: expected some of {', '.join(part.name for part in PARTS)}")
    chosen = [part for part in PARTS if not names or part.name in names]
    if given.list:
        for part in chosen:
            done = "measured" if _is_new(given.folder, part) else f"about {part.seconds} s"
            print(f"{part.name:<26} {part.dtype:<9} {MODELS[part.model]:<21} {', '.join(part.others)}: {done}")
        return 0
    if not given.no_store and (changed := _git("status", "--porcelain", "--", *MEASURES)):
        raise ConfigError(f"the code that is measured is not committed (or use --no-store):\n{changed}")
    given.folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * given.minutes
    failed = [part.name for part in chosen if not _measure(part, given, ends)]
    tables = {dtype: _table(dtype, given) for dtype in ("bfloat16", "float32")}
    for dtype, table in tables.items():
        if table is not None and not given.no_store:
            with replacing(DATA / f"first-token-{dtype}.json") as stream:
                stream.write(table.encode())
    if not given.no_store:
        subprocess.run([sys.executable, ROOT / "docs" / "figures.py"], cwd=ROOT, check=False)
    return 1 if failed else 0


def _measure(part: Part, given: Any, ends: float) -> bool:
    """Measure a part unless it is done or there is no time for it; return False if it failed."""
    file = given.folder / f"{part.name}.json"
    if not given.again and _is_new(given.folder, part):
        _say(f"{part.name}: measured before")
        return True
    left = ends - time.monotonic()
    seconds = part.seconds if given.tokens is None else 60
    if left < seconds:
        _say(f"{part.name}: takes about {seconds} s and {max(0, left):.0f} s are left: use more --minutes")
        return True
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "mpirun"
    tokens = given.tokens or part.tokens
    strategies = [name for name in part.others if name in ("single", "ring", "ring-lent")]
    engines = [name for name in part.others if name not in strategies]
    words = ["--model", part.model, "--dtype", part.dtype, "--device", "cpu", "--contexts", str(tokens)]
    words += ["--strategies", ",".join([*strategies, OURS]), "--rivals", ",".join(engines)]
    words += ["--rivals-folder", str(given.rivals_folder), "--repeats", str(part.pairs)]
    words += ["--time-limit", f"{seconds // 60}:{seconds % 60:02d}", *_slices(part, tokens, given.folder)]
    rows = given.folder / f".{part.name}.rows"
    command = [mpirun, "-n", str(given.ranks), sys.executable, "-m", "benchmarks", "first-token", *words]
    _say(f"{part.name}: about {seconds} s")
    began = time.monotonic()
    code, said = _run([*command, "--json", str(rows)], SLOWER * part.seconds + 120)
    kept: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": _git("rev-parse", "--short", "HEAD"),
        "processor": f"{os.cpu_count()} cores of {processor_name()}",
        "versions": {name: version(name) for name in ("torch", "transformers", "mpi4py")},
    }
    if code == 0:
        kept["rows"] = json.loads(rows.read_text())
        rows.unlink()
    else:
        kept["failed"] = " ".join(said[-3:]).strip()[-300:] or f"it ended with {code} and no message"
    with replacing(file) as stream:
        stream.write(json.dumps(kept, indent=1).encode())
    _say(f"{part.name}: {'FAILED' if code else 'done'} in {time.monotonic() - began:.0f} s")
    return code == 0


def _run(command: Sequence[str], limit_s: float) -> tuple[int, list[str]]:
    """Run a command, end it after a time, and print its log as it comes; return its exit code and the log's lines."""
    said = list[str]()
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(limit_s, process.terminate)
        timer.start()
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            said.append(line.strip())
        code = process.wait()
        timer.cancel()
    return code, said


def _slices(part: Part, tokens: int, folder: Path) -> list[str]:
    """Return the slices that another part has found for the same prompt, which saves the search."""
    for other in PARTS:
        if (other.dtype, other.model) == (part.dtype, part.model) and _is_new(folder, other):
            for row in _read(folder, other)["rows"]:
                if row["strategy"] == OURS and row["context_tokens"] == tokens:
                    return ["--slices", f"{tokens}={row['slices']}"]
    return []


def _read(folder: Path, part: Part) -> Any:
    return json.loads((folder / f"{part.name}.json").read_text())


def _is_new(folder: Path, part: Part) -> bool:
    """Whether a part was measured, and its code has not changed since."""
    if not (folder / f"{part.name}.json").exists():
        return False
    found = _read(folder, part)
    same = subprocess.run(["git", "diff", "--quiet", found["commit"], "HEAD", "--", *MEASURES], cwd=ROOT)
    return "rows" in found and same.returncode == 0


def _table(dtype: str, given: Any) -> str | None:
    """Print the parts of a dtype as a table, and make a measurement of them; None if there is none."""
    known = {part: _read(given.folder, part) for part in PARTS if (given.folder / f"{part.name}.json").exists()}
    found = {
        part: kept
        for part, kept in known.items()
        if part.dtype == dtype and ("failed" in kept or _is_new(given.folder, part))
    }
    of: dict[tuple[str, int], dict[str, list[Any]]] = {}
    for part, kept in found.items():
        for row in kept.get("rows", ()):
            group = of.setdefault((MODELS[part.model], row["context_tokens"]), {OURS: []})
            group.setdefault(row["strategy"], []).append(row)
    rows = [
        [
            f"{model}, {tokens:,} tokens",
            LABELS[name],
            _runs_in(each[0]),
            _seconds(name, each),
            _times(each[0]),
            each[0]["error"],
        ]
        for (model, tokens), group in of.items()
        for name, each in group.items()
    ]
    for part, kept in found.items():
        if "failed" in kept:
            print(f"{part.name} ({', '.join(part.others)}) is not in the table: {kept['failed']}")
    if not rows:
        return None
    for row in rows:
        print(" | ".join(map(str, row)))
    first = next(kept for kept in found.values() if "rows" in kept)
    about = ", ".join(f"{name} {each}" for name, each in first["versions"].items() if name != "mpi4py")
    engines = {
        LABELS[row["strategy"]]: row["version"].partition("-")[0]
        for kept in found.values()
        for row in kept.get("rows", ())
    }
    about += "".join(f", {name} {each}" for name, each in engines.items() if each)
    measurement = {
        "title": f"Time to the first token in {dtype}, in pairs with ours",
        "command": "python -m benchmarks headline",
        "machine": f"{given.machine or first['processor']}; {about}",
        "date": max(kept["date"] for kept in found.values()),
        "dated_by": "run",
        "commit": first["commit"],
        "measures": MEASURES,
        "kind": "table",
        "columns": [
            ["model, prompt", "{}"],
            ["engine", "{}"],
            ["computes in", "{}"],
            ["seconds", "{:.2f}"],
            ["x kvr-mpi", "{}"],
            ["error", "{:.0e}"],
        ],
    }
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return json.dumps(measurement, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n'


def _runs_in(row: Any) -> str:
    return str(row["runs_in"])


def _seconds(name: str, rows: Sequence[Any]) -> float:
    """Return the median; of ours, which ran beside several others, that of all parts."""
    return float(statistics.median(row["ttft_s"] for row in rows))


def _times(row: Any) -> str:
    """Return the time as a multiple of ours, as the other tables have it."""
    if row["strategy"] == row["ours"]:
        return "-"
    if row["pairs"] < 5:
        return f"{row['times_ours']:.2f} ({counted(row['pairs'], 'pair')})"
    return f"{row['times_ours']:.2f} ({row['times_ours_low']:.2f}-{row['times_ours_high']:.2f})"


def _say(text: str) -> None:
    print(f"[{datetime.now():%H:%M:%S}] headline: {text}", file=sys.stderr, flush=True)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
