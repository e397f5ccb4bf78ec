"""KV-Runahead, TSP and ring on links slower than shared memory, as root.

Every case starts ``python -m benchmarks first-token`` with one rank on each of its hosts (see `hosts`), all with one
core, and with links shaped in both directions. In the noisy case (after section 5 and Fig. 11 of the KV-Runahead paper)
one link, drawn anew every second, runs at a fifth of the others' rate while prompts run; the slices of kvr-s are those
that were found without noise, as they would be in practice. The loss is against the same hosts and slices without
noise.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.hosts import Host, Shaper, hosts, run_mpi, shape, why_not
from benchmarks.options import make_parser
from kvr_mpi.cli.options import DEFAULT_MODEL
from kvr_mpi.errors import counted
from kvr_mpi.report.table import print_table

GBIT = 1_000_000_000
MBIT = 1_000_000
NOISY_RATE = 200 * MBIT
PROGRAM = (sys.executable, "-m", "benchmarks", "first-token")
NOISE_S = 1.0  # how long a link stays slow
OURS = "kvr-s"
COPIED = "strategy context_tokens repeats ttft_s ttft_min_s ttft_max_s wait_s link_bytes slices".split()


@dataclass(frozen=True, slots=True)
class Case:
    """Hosts and their links."""

    hosts: int
    rate: int | None
    quiet: str | None = None  # noisy: the case to compare with

    @property
    def title(self) -> str:
        return f"{self.hosts} hosts, {speed(self.rate)}{', noisy' if self.quiet else ''}"


CASES = {
    "2-unshaped": Case(2, None),
    "2-1gbit": Case(2, GBIT),
    "2-1gbit-noisy": Case(2, GBIT, quiet="2-1gbit"),
    "2-100mbit": Case(2, 100 * MBIT),
    "4-1gbit": Case(4, GBIT),
    "4-1gbit-noisy": Case(4, GBIT, quiet="4-1gbit"),
}


@dataclass(frozen=True, slots=True)
class Result:
    """One strategy in one case."""

    case: str
    strategy: str
    hosts: int
    bits_per_s: int | None
    noisy: bool
    context_tokens: int
    repeats: int
    ttft_s: float
    ttft_min_s: float
    ttft_max_s: float
    wait_s: float
    link_bytes: int
    slices: str
    times_kvr_s: float | None  # time over that of kvr-s; above 1: kvr-s is faster
    noise_loss: float | None  # time over that without noise, less 1


class CaseError(Exception):
    """A case did not give its figures."""


class Noise:
    """Slows one link after another, at random, once it is told to start.

    Parameters
    ----------
    group : sequence of Host
        Hosts whose links are at `rate`.
    rate, slow : int
        Bits per second of a link at peace, and of the one that is disturbed.
    seed : int
        Which links, in what order.
    """

    def __init__(self, group: Sequence[Host], rate: int, slow: int, seed: int) -> None:
        self._group, self._rate, self._slow = group, rate, slow
        self._shaper = Shaper(group)
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="noise", daemon=True)
        self.failure: Exception | None = None
        self.drawn = 0

    def start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """End, with all links at peace."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._shaper.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                host = self._random.choice(self._group)
                self._shaper.shape(host, self._slow)
                self.drawn += 1
                self._stop.wait(NOISE_S)
                self._shaper.shape(host, self._rate)
        except Exception as error:
            self.failure = error  # raised where the case ends


def speed(bits_per_s: int | None) -> str:
    """Write a rate as people do."""
    if bits_per_s is None:
        return "unshaped"
    return f"{bits_per_s / GBIT:g} Gbit/s" if bits_per_s >= GBIT else f"{bits_per_s / MBIT:g} Mbit/s"


def run_case(name: str, options: argparse.Namespace, quiet: Sequence[Result]) -> list[Result]:
    """Make the hosts, run the benchmark of first tokens on them, remove them.

    Parameters
    ----------
    name : str
        One of `CASES`.
    options : argparse.Namespace
        From the command line.
    quiet : sequence of Result
        A noisy case's results without noise.

    Raises
    ------
    CaseError
        If the benchmark or the noise fails.
    """
    case = CASES[name]
    with hosts(case.hosts) as group, tempfile.TemporaryDirectory(prefix="bench-network-") as folder:
        for host in group:
            shape(host, case.rate)
        noise = Noise(group, case.rate or GBIT, NOISY_RATE, options.seed) if case.quiet else None

        def follow(line: str) -> None:
            if noise is not None and "; lengths [" in line:  # the model is loaded, prompts begin
                noise.start()
            if line.startswith("["):  # the log; the rest is a table, which ours replaces
                say(f"  {line}")

        found = Path(folder) / "bench.json"
        command: list[str | Path] = [*PROGRAM, "--device", "cpu", "--model", options.model]
        command += ["--strategies", ",".join(options.strategies), "--contexts", str(options.context)]
        command += ["--repeats", str(options.repeats), "--json", found, *(["--lend"] if options.lend else [])]
        command += ["--dtype", options.dtype] if options.dtype else []
        for result in quiet:
            if result.strategy == OURS:
                command += ["--slices", f"{result.context_tokens}={result.slices}"]
        try:
            done = run_mpi(group, command, timeout_s=options.timeout, on_line=follow)
        except subprocess.TimeoutExpired as error:
            raise CaseError(f"first-token did not finish within {options.timeout:.0f} s (--timeout)") from error
        finally:
            if noise is not None:
                noise.stop()
        if done.returncode or not found.exists():
            raise CaseError(f"first-token ended with exit status {done.returncode}:\n{done.stdout.strip()}")
        if noise is not None:
            if noise.failure is not None or not noise.drawn:
                raise CaseError(f"there was no noise while prompts ran: {noise.failure or 'it was never started'}")
            say(f"  slow links drawn: {noise.drawn}")
        rows = json.loads(found.read_text())
    ours = next((row["ttft_s"] for row in rows if row["strategy"] == OURS), None)
    before = {result.strategy: result.ttft_s for result in quiet}
    return [
        Result(
            case=name,
            hosts=case.hosts,
            bits_per_s=case.rate,
            noisy=case.quiet is not None,
            **{key: row[key] for key in COPIED},
            times_kvr_s=row["ttft_s"] / ours if ours else None,
            noise_loss=row["ttft_s"] / before[row["strategy"]] - 1 if row["strategy"] in before else None,
        )
        for row in rows
    ]


def show(results: Sequence[Result]) -> None:
    """Print the table."""
    rows = [
        (
            CASES[result.case].title,
            result.strategy,
            f"{result.ttft_s:.3f} s",
            f"{result.wait_s:.3f} s",
            "" if result.times_kvr_s is None else f"{result.times_kvr_s:.2f}",
            "" if result.noise_loss is None else f"{100 * result.noise_loss:+.1f}%",
            result.slices,
        )
        for result in results
    ]
    print_table(("case", "strategy", "first token", "wait", "time / kvr-s", "loss by noise", "slices"), rows)


def say(text: str) -> None:
    """Print one line at once."""
    print(text, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the cases asked for, and print what was found, also if one of them fails.

    Returns
    -------
    int
        Exit status: 0, 1 if a case failed, 78 if this machine cannot make hosts.
    """
    options = _arguments(arguments)
    reason = why_not()
    if reason is not None:
        print(f"network: {reason}", file=sys.stderr)
        return 78
    results: dict[str, list[Result]] = {}
    failure: CaseError | None = None
    began = time.monotonic()
    try:
        for name in options.cases:
            say(f"{name}: {CASES[name].title}; {options.context} tokens, one rank and one core per host")
            results[name] = run_case(name, options, results.get(CASES[name].quiet or "", []))
    except CaseError as error:
        failure = error
    flat = [result for rows in results.values() for result in rows]
    if flat:
        say(
            f"\n{options.context} tokens, {counted(options.repeats, 'repetition')}, "
            f"{time.monotonic() - began:.0f} s in all\n"
        )
        show(flat)
    if options.json and flat:
        options.json.write_text(json.dumps([asdict(result) for result in flat], indent=1) + "\n")
    if failure is not None:
        print(f"network: {name}: {failure}", file=sys.stderr)
        return 1
    return 0


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("network", __doc__)
    parser.add_argument("--cases", type=_cases, default=list(CASES), help=f"some of {','.join(CASES)} (default: all)")
    parser.add_argument("--context", type=int, default=4096, help="prompt length in tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="counted repetitions (default: %(default)s)")
    parser.add_argument(
        "--strategies", type=_words, default="kvr-s,ring,tsp-causal", help="as in first-token (default: %(default)s)"
    )
    parser.add_argument(
        "--lend", action="store_true", help="also use our kernels and short last layer for the alternatives"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as in first-token; it must be on this machine already")
    parser.add_argument("--dtype", help="as in first-token")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for a case (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    return parser.parse_args(arguments)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _cases(text: str) -> list[str]:
    """Read names of cases; a noisy one brings the quiet one it is compared with."""
    asked = set(_words(text))
    unknown = asked - set(CASES)
    if unknown or not asked:
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {','.join(CASES)}")
    asked |= {quiet for name in asked if (quiet := CASES[name].quiet)}
    return [name for name in CASES if name in asked]
