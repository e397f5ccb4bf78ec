"""All that has to be seen on a machine with one or more GPUs, in at most half an hour: `make test-gpu`.

Every step runs in a process of its own, with a time limit and a stack dump. The report, ``gpu-report.json`` and
``gpu-report.txt`` in the folder of ``--output``, is written after every step; with ``logs/``, where all that the steps
printed is, it is what to send in.

Exit codes: 0 all steps that this machine can do went well; 1 one failed or did not end; 77 there is no GPU, and
nothing but the first step has been done.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from gpu_many import remove_model
from gpu_steps import Given, Outcome, Step, is_without_gpus, run_all, run_inside, write_report

# What matters most comes first: an allocation may end, and a machine hang, at any step. All limits together are half an
# hour, but for those that need --model.
STEPS = (
    Step("machine", "versions, GPUs, and how they are connected", "gpu_machine:look_around", 30, needs_gpu=False),
    Step("attention", "every kind of attention against float64", "gpu_correctness:attention_is_exact", 50),
    Step("first token, ranks", "16k and 64k on 1, 2, 4, 8 GPUs", "gpu_many:first_tokens_by_ranks", 250),
    Step("nccl, 2 ranks", "kvr verify over NCCL, bfloat16 and float32", "gpu_ranks:nccl_is_exact_on_2", 100),
    Step("nccl, all ranks", "the same on eight GPUs, or four", "gpu_ranks:nccl_is_exact_on_all", 110),
    Step("full job", "200 documents of many lengths, little memory", "gpu_many:job_fills_memory", 120),
    Step("hanging ranks", "a rank is stopped, or killed: the job ends", "gpu_many:hanging_ranks_end_jobs", 120),
    Step("first token", "16k and 32k on one GPU, against transformers", "gpu_speed:first_token", 110),
    Step("decode", "1, 8, 32 and 128 sequences together", "gpu_speed:decode_together", 70),
    Step("decode, group", "a tensor-parallel group of 4", "gpu_many:groups_decode", 80),
    Step("links", "every link, by the size of a message", "gpu_many:every_link", 45),
    Step("connections", "memory and seconds that NCCL takes", "gpu_many:connections_take_memory", 45),
    Step("distinct lengths", "what a length costs that was not seen", "gpu_speed:distinct_lengths", 30),
    Step("profiler", "where the time of a prefill, and of a step, goes", "gpu_speed:where_time_goes", 50),
    Step("pretrained", "the demo's model against transformers on a CPU", "gpu_correctness:pretrained_is_exact", 50),
    Step("quantised", "FP8 and other layouts against expanded weights", "gpu_correctness:quantised_is_exact", 40),
    Step("flex", "soft caps, wide heads by FlexAttention, against float64", "gpu_features:bent_scores_are_exact", 75),
    Step("synchronisation", "what waits for the GPU within a prefill", "gpu_correctness:nothing_synchronises", 40),
    Step("out of memory", "of one rank of three; the next prompt is right", "gpu_correctness:memory_runs_out", 40),
    Step("staged", "three ranks on one GPU, through pinned host memory", "gpu_ranks:staged_ranks_are_exact", 50),
    Step("doctor", "kvr doctor", "gpu_ranks:doctor_is_content", 50),
    Step("tensor-parallel", "groups of two GPUs, on 2 and 4, against one rank", "gpu_jobs:groups_answer_alike", 70),
    Step("failing sums", "a rank of a group fails between its sums", "gpu_jobs:failures_end_sums", 30),
    Step("asking", "stored keys and values that are asked, on one GPU", "gpu_jobs:stored_is_asked", 60),
    Step("ragged", "heads with tokens of their own against float64", "gpu_features:ragged_heads_are_exact", 30),
    Step("rolling", "rolling caches against whole ones", "gpu_features:rolling_caches_are_exact", 30),
    Step("cuda-aware mpi", "ranks over an MPI that takes GPU memory", "gpu_ranks:cuda_aware_mpi_is_exact", 25),
    Step("vllm", "first tokens by vLLM, if installed", "gpu_speed:first_token_of_vllm", 150, needs_model=True),
    Step("profile", "what this machine takes, for tables/", "gpu_speed:write_profile", 120, needs_model=True),
)
NO_GPU = 77
BUDGET_S = 1800.0


def main() -> int:
    """Run all steps, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder of a model, for the steps that load one by name")
    parser.add_argument("--output", default="runs/gpu", help="folder of the report  [default: runs/gpu]")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help=f"seconds  [default: {BUDGET_S:.0f}]")
    parser.add_argument("--step", choices=[step.name for step in STEPS], help="run this step only, here")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds for it, if fewer than it takes otherwise")
    told = parser.parse_args()
    given = Given(told.model, told.output)
    if told.step:
        step = next(step for step in STEPS if step.name == told.step)
        run_inside(replace(step, timeout_s=told.limit or step.timeout_s), given)
        return 0
    about = {
        "kvr-mpi": version("kvr-mpi"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "model": told.model or "random weights",
    }
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the end of an allocation
    pages: list[str] = []

    def tell(outcomes: Sequence[Outcome]) -> None:
        pages.append(write_report(outcomes, about, Path(told.output)))

    try:
        outcomes = run_all(STEPS, given, Path(__file__), told.budget, tell)
    finally:
        remove_model()
        print(f"\n{pages[-1] if pages else 'stopped before the first step had ended'}", flush=True)
    if any(outcome.status in ("failed", "timeout") for outcome in outcomes):
        return 1
    if is_without_gpus(outcomes):
        print(f"No GPU here: stopped before the first step that needs one ({STEPS[1].name}); exit code {NO_GPU}.")
        return NO_GPU
    return 0


if __name__ == "__main__":
    sys.exit(main())
