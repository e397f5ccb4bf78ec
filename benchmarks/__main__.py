"""``python -m benchmarks NAME [options]``, from the folder that holds ``benchmarks/``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

import click

from kvr_mpi.errors import EXIT_USAGE, KvrError

# Name: (module with a function `main`, what it does).
BENCHMARKS = {
    "first-token": ("first_token", "Seconds to the first token of each strategy, and of other engines, in pairs."),
    "headline": ("headline", "The docs' headline tables: every rival in bfloat16 and float32, part by part."),
    "corpus": ("corpus", "Documents per hour of a job: chains, data parallelism, generate, other engines."),
    "fairkv": ("fairkv", "Compressed documents decoded with KV heads placed on ranks in several ways."),
    "fairkv-placement": ("fairkv_placement", "Expected gain of head placements from a profile of the heads (no run)."),
    "paper": ("paper", "The cost model compared with the measurements of the KV-Runahead paper (no run)."),
    "calibrate": ("calibrate", "Fit the rates of the KV-Runahead paper's machine to its measurements (no run)."),
    "forecast": (
        "forecast",
        "Forecasts of all strategies by prompt length and ranks, as in the paper's figures (no run).",
    ),
    "slices": ("slices", "Slices of a lookup table against a sweep around them, and against lengths between."),
    "architectures": ("survey", "Every architecture of transformers in tiny, compared with plain transformers."),
    "compress": ("compress", "Continuations and needles of compressed prompts against the full cache."),
    "decode": ("decode", "Documents decoded together on one core, compared with one by one."),
    "kernels": ("kernels", "Products and attention of several models' shapes as shares of a core's peak."),
    "ask": ("ask", "Questions about stored documents, compared with a new prefill; writing and reading KV."),
    "chunks": ("chunks", "A slice computed in chunks, compared with the whole slice."),
    "slow-chunks": ("slow_chunks", "The same on simulated hosts with slow links (root)."),
    "streaming": ("streaming", "A rolling cache against a whole one in chunks; memory of short and long prompts."),
    "network": ("network", "Time to first token on simulated hosts with slow links (root)."),
    "links": ("links", "Bandwidth of every link of a chain by message size."),
    "store": ("store", "Writing keys and values, compared with np.tofile and fsync; the cost of durability."),
    "gather": ("gather", "Merging the shares of an array, against copying their bytes."),
    "report": ("report", "Seconds that a browser takes to open the report of 10,000 documents."),
    "trace": ("trace", "The overhead of recording a trace."),
    "peers": ("peers.compare", "A batch file through kvr-mpi, vLLM's run-batch and datatrove, each killed halfway."),
}


def main(words: Sequence[str]) -> int:
    """Run a benchmark.

    Parameters
    ----------
    words : sequence of str
        Its name and its options.

    Returns
    -------
    int
        Exit code.
    """
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print("usage: python -m benchmarks NAME [options]      (NAME --help lists the options)\n")
        print("\n".join(f"  {name:<17} {about}" for name, (_, about) in BENCHMARKS.items()))
        return 0
    if name not in BENCHMARKS:
        print(f"python -m benchmarks {name!r}: expected one of {', '.join(BENCHMARKS)}", file=sys.stderr)
        return EXIT_USAGE
    run: click.Command | Callable[[Sequence[str]], int | None]
    run = importlib.import_module(f"benchmarks.{BENCHMARKS[name][0]}").main
    try:
        if isinstance(run, click.Command):
            return run.main(list(words[1:]), f"python -m benchmarks {name}", standalone_mode=False) or 0
        return run(words[1:]) or 0
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except KvrError as error:
        print(f"python -m benchmarks {name}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
