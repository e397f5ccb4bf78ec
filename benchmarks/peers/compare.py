"""A batch file through us, vLLM's ``run-batch`` and datatrove's runner, each killed at half.

Every peer answers the same requests with the same model in float32 on the same cores: once undisturbed, and once killed
with all its processes (SIGKILL) when it has computed half of the answers, then started again by the same command. Told
are the answers that it finds again on the disk, those that it computed twice, and documents an hour, from starting the
program to its end. A peer that cannot run on this machine is named, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.options import make_parser
from benchmarks.peers.batch_file import write_batch_file
from benchmarks.peers.killing import Life, PeerError, live
from benchmarks.peers.peer_programs import Peer, Task, find_peers
from kvr_mpi.cli.options import DEFAULT_MODEL
from kvr_mpi.model.source import convert_gguf, find_model
from kvr_mpi.report.table import print_table

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One peer's figures.

    computed, left : answers it had computed when it was killed, and those it found again.
    again : answers that it computed twice, in all.
    same : of the answers in the end, how many are those of the undisturbed run; None without one.
    seconds : of the undisturbed run, from the program's start; None without one.
    """

    peer: str
    rows: int
    computed: int
    left: int
    again: int
    same: int | None
    seconds: float | None


def try_peer(peer: Peer, task: Task, ids: list[str], folder: Path, *, undisturbed: bool, timeout_s: float) -> Outcome:
    """Let a peer answer all requests, with and without being killed.

    Raises
    ------
    PeerError
        If it fails, or has not answered all in the end.
    """

    def run(name: str, output: Path, kill_at: int | None = None) -> Life:
        command, log = peer.command(task, output), folder / f"{name}.log"
        environment = peer.environment(task)
        return live(command, environment, peer.answered, log, timeout_s=timeout_s, kill_at=kill_at)

    whole, expected = None, None
    if undisturbed:
        output = _new(folder / "undisturbed")
        whole = run("undisturbed", output)
        expected = _all_of(peer, output, ids)
    output = _new(folder / "killed")
    killed = run("killed", output, len(ids) // 2)
    left = len(peer.kept(output))
    computed = max(left, killed.answered)  # one may have been kept, and not been told of yet
    restarted = run("restarted", output)
    found = _all_of(peer, output, ids)
    return Outcome(
        peer.name,
        len(ids),
        computed,
        left,
        computed + restarted.answered - len(ids),
        None if expected is None else sum(found[name] == expected[name] for name in ids),
        None if whole is None else whole.seconds,
    )


def _new(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _all_of(peer: Peer, output: Path, ids: list[str]) -> dict[str, str]:
    found = peer.kept(output)
    if missing := set(ids) - set(found):
        raise PeerError(f"{len(missing)} of {len(ids)} requests have no answer in the end, such as {min(missing)}")
    return found


def main(arguments: Sequence[str]) -> int:
    """Try all peers that are asked for, and print a table."""
    options = _arguments(arguments)
    known = find_peers(options.rivals)
    model = convert_gguf(find_model(DEFAULT_MODEL), options.rivals / "models")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="peers-", dir=options.folder) as made:
        folder = Path(made)
        task = Task(folder / "requests.jsonl", model, options.ranks, compiles=not options.eager)
        ids = write_batch_file(task.requests, ROOT / "jobs" / "demo", options.rows)
        for name in options.peers or known:
            if why_not := known[name].why_not():
                print(f"{name}: cannot run here: {why_not}", file=sys.stderr)
                continue
            undisturbed, timeout_s = not options.killed_only, options.timeout
            try:
                place = _new(folder / name.replace(" ", "-"))
                outcome = try_peer(known[name], task, ids, place, undisturbed=undisturbed, timeout_s=timeout_s)
            except PeerError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            print(f"{name}: {outcome}", file=sys.stderr)
            outcomes.append(outcome)
    show(outcomes)
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return 0 if outcomes else 1


def show(outcomes: list[Outcome]) -> None:
    """Print a table of what was found."""
    rows = []
    for one in outcomes:
        per_hour = "-" if one.seconds is None else f"{one.rows / one.seconds * 3600:.0f}"
        same = "-" if one.same is None else one.same
        rows.append((one.peer, one.rows, one.computed, one.left, one.again, same, per_hour))
    names = ("peer", "rows", "computed when killed", "left", "computed again", "same answers", "documents/h")
    print_table(names, rows)


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("peers", __doc__)
    parser.add_argument("--peers", nargs="+", choices=list(find_peers(Path())), help="some of them (default: all)")
    parser.add_argument("--rows", type=int, default=100, help="requests in the file (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="of ours (default: %(default)s)")
    parser.add_argument("--killed-only", action="store_true", help="leave out the undisturbed runs, which are timed")
    parser.add_argument("--eager", action="store_true", help="vLLM does not compile: it starts sooner, and is slower")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one life (default: %(default)s)")
    parser.add_argument("--rivals", type=Path, default=Path(".rivals"), help="their environments (default: .rivals)")
    parser.add_argument("--folder", type=Path, default=Path(), help="where a temporary folder is made (default: here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args(arguments)
    options.rivals, options.folder = options.rivals.resolve(), options.folder.resolve()
    return options
