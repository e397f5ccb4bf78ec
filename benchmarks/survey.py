"""The catalogue of architectures, judged by a few processes: none that crashes or hangs takes the others with it.

A process judges some entries, so that the seconds of importing torch are paid once for them. It is killed if an entry
takes too long; another goes on with those that are left.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO

import click

from benchmarks.architectures import BAD, BEGINS, CLASSES, TRACEBACK, Entry, Verdict, catalogue, choose
from benchmarks.catalogue_table import put_into, render
from kvr_mpi.cli.options import command, parse_names

ROOT = Path(__file__).resolve().parent.parent
EXIT_DIFFERS = 1
AT_ONCE = 16  # entries a process judges
START_S = 60.0  # what a process may take to import torch, on top of its first entry's time


def survey(
    entries: dict[str, Entry], names: Sequence[str], *, processes: int = 2, limit_s: float = 120.0
) -> Iterator[Verdict]:
    """Judge entries, each within a time limit; verdicts come as they are reached.

    Parameters
    ----------
    entries : dict
        The catalogue.
    names : sequence of str
        Those to be judged.
    limit_s : float
        For one entry.
    """
    groups: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    size = max(1, min(AT_ONCE, -(-len(names) // processes)))
    for at in range(0, len(names), size):
        groups.put(list(names[at : at + size]))
    verdicts: queue.SimpleQueue[Verdict | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            with contextlib.suppress(queue.Empty):
                while True:
                    for verdict in _judge_group(entries, groups.get_nowait(), limit_s):
                        verdicts.put(verdict)
        finally:
            verdicts.put(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    running = processes
    while running:
        verdict = verdicts.get()
        if verdict is None:
            running -= 1
        else:
            yield verdict


def _judge_group(entries: dict[str, Entry], names: list[str], limit_s: float) -> Iterator[Verdict]:
    """Judge entries in a process of their own, and in further ones if it does not reach the end."""
    left = list(names)
    while left:
        why = None
        for verdict_or_why in _run_process(left, limit_s):
            if isinstance(verdict_or_why, Verdict):
                left.remove(verdict_or_why.name)
                yield verdict_or_why
            else:
                why = verdict_or_why
        if left:
            entry = entries[left.pop(0)]
            yield Verdict(entry.name, entry.model_type, "", TRACEBACK, why or "its process ended before it")


def _run_process(names: Sequence[str], limit_s: float) -> Iterator[Verdict | str]:
    """Verdicts of one process, in the order of the names, and at the end why there are no more."""
    command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.architectures", *names]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, text=True, cwd=ROOT
        ) as process,
    ):
        assert process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.send_signal(signal.SIGABRT)  # faulthandler writes down where its threads are

        try:
            allowed_s = START_S + limit_s
            while True:
                timer = threading.Timer(allowed_s, stop)
                timer.start()
                line = process.stdout.readline()
                timer.cancel()
                if not line.endswith("\n"):
                    break
                yield Verdict.from_json(line)
                allowed_s = limit_s
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0 if late.is_set() else 0.0)
            process.kill()
        code = process.wait()
        errors.seek(0)
        yield _where(limit_s, errors.read()) if late.is_set() else _last_words(code, errors.read())


def _where(limit_s: float, errors: str) -> str:
    """Say where a process was that did not end: in which strategy, and its threads in files of ours."""
    places = []
    for thread in re.split(r"^(?:Current thread|Thread) ", errors, flags=re.MULTILINE)[1:]:
        frames = re.findall(r'File "[^"]*?(?:kvr_mpi|benchmarks)/([^"]+)", line (\d+) in (\S+)', thread)
        places.append(" < ".join(f"{file}:{line} {function}" for file, line, function in frames[:4]))
    places = [place for place in dict.fromkeys(places) if place]
    waits = f"; in {', and in '.join(places)}" if places else ""
    return f"{_strategy(errors)}it did not end within {limit_s:g} s{waits}"


def _strategy(errors: str) -> str:
    """Name the strategy that was under way."""
    begun = re.findall(rf"^{BEGINS}(.+)$", errors, flags=re.MULTILINE)
    return f"{begun[-1]}: " if begun else ""


def _last_words(code: int, errors: str) -> str:
    """Say how a process ended."""
    lines = [line.strip() for line in errors.splitlines() if line.strip() and not line.startswith(BEGINS)]
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"{_strategy(errors)}its process {how}{': ' + lines[-1][:200] if lines else ''}"


@command("architectures")
@click.option("--only", default="", metavar="NAME,...", help="Check only these model types and variants.")
@click.option("--table", type=click.Path(dir_okay=False, path_type=Path), help="Write the lists into a page.")
@click.option("--json", "lines", type=click.File("w"), help="Write one line of JSON per architecture.")
def main(only: str, table: Path | None, lines: IO[str] | None) -> int:
    """Compare every architecture in transformers, tiny and random, with plain transformers.

    \b
    python -m benchmarks architectures --only "llama,phi3 longrope above"

    The exit code is 0 only if none is wrong.
    """  # noqa: D301
    entries = catalogue()
    names = choose(entries, parse_names(only))
    if table is not None:  # before minutes have gone by
        table.parent.mkdir(parents=True, exist_ok=True)
        table.touch()
    verdicts = []
    for verdict in survey(entries, names, processes=min(os.cpu_count() or 1, 8, len(names))):
        verdicts.append(verdict)
        click.echo(f"{verdict.kind}: {verdict.name}{': ' + ' '.join(verdict.reason.split()) if verdict.reason else ''}")
        if lines is not None:
            lines.write(verdict.as_json() + "\n")
            lines.flush()
    counts = {kind: sum(verdict.kind == kind for verdict in verdicts) for kind in CLASSES}
    click.echo(f"of {len(verdicts)}: {', '.join(f'{count} {kind}' for kind, count in counts.items() if count)}")
    if table is not None:
        versions = ", ".join(f"{name} {version(name)}" for name in ("kvr-mpi", "transformers", "torch"))
        table.write_text(put_into(table.read_text(), render(entries, verdicts, versions, datetime.date.today())))
    return EXIT_DIFFERS if any(verdict.kind in BAD for verdict in verdicts) else 0
