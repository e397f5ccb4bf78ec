"""All that has to be seen on a machine with one or more GPUs, in at most half an hour: `make test-gpu`.

Every step runs in a process of its own, with a time limit and a stack dump. The report, ``gpu-report.json`` and
``gpu-report.txt`` in the folder of ``--output``, is what to send in.

Exit codes: 0 all steps that this machine can do went well; 1 one failed or did not end; 77 there is no GPU, and
nothing but the first step has been done.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from gpu_machine import has_gpu
from gpu_steps import Given, Step, run_all, run_inside, write_report

STEPS = (
    Step("machine", "versions, GPUs, and how they are connected", "gpu_machine:look_around", 60, needs_gpu=False),
    Step("attention", "every kind of attention against float64", "gpu_correctness:attention_is_exact", 180),
    Step("merges", "eight parts in bfloat16 against one pass", "gpu_features:parts_lose_little", 60),
    Step(
        "flex",
        "soft caps and wide heads by FlexAttention, compiled, against float64",
        "gpu_features:bent_scores_are_exact",
        240,
    ),
    Step(
        "self-check", "an 8B model's shape, random weights: a chain's logits", "gpu_correctness:self_checks_hold", 240
    ),
    Step("synchronisation", "what waits for the GPU within a prefill", "gpu_correctness:nothing_synchronises", 120),
    Step(
        "out of memory",
        "one rank of three runs out of memory; the next prompt is right",
        "gpu_correctness:memory_runs_out",
        120,
    ),
    Step("staged", "three ranks on one GPU, through pinned host memory", "gpu_ranks:staged_ranks_are_exact", 180),
    Step("doctor", "kvr doctor, GPU buffers tried", "gpu_ranks:doctor_is_content", 180),
    Step("nccl", "2, 4 and 8 ranks over NCCL, as many as there are GPUs", "gpu_ranks:nccl_is_exact", 300),
    Step(
        "tensor-parallel",
        "a job on groups of two GPUs, on 2 and 4, against one rank",
        "gpu_jobs:groups_answer_alike",
        240,
    ),
    Step("asking", "stored keys and values that are asked, on one GPU", "gpu_jobs:stored_is_asked", 240),
    Step("cuda-aware mpi", "ranks over an MPI that takes GPU memory", "gpu_ranks:cuda_aware_mpi_is_exact", 180),
    Step("ragged", "heads with tokens of their own against float64", "gpu_features:ragged_heads_are_exact", 120),
    Step("rolling", "rolling caches against whole ones", "gpu_features:rolling_caches_are_exact", 120),
    Step("decode", "1, 8 and 32 sequences together", "gpu_speed:decode_together", 240),
    Step("first token", "32k and 128k on one GPU, against transformers", "gpu_speed:first_token", 300),
    Step(
        "first token, ranks",
        "the same over all GPUs, every strategy (--model)",
        "gpu_speed:first_token_over_ranks",
        300,
    ),
    Step("vllm", "the same by vLLM, if it is installed (--model)", "gpu_speed:first_token_of_vllm", 300),
    Step("profile", "what this machine takes, for tables/ (--model)", "gpu_speed:write_profile", 240),
)
NO_GPU = 77


def main() -> int:
    """Run all steps, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder of a model, for the steps that load one by name")
    parser.add_argument("--output", default="runs/gpu", help="folder of the report  [default: runs/gpu]")
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds  [default: 1800]")
    parser.add_argument("--step", choices=[step.name for step in STEPS], help="run this step only, here")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds for it, if fewer than it takes otherwise")
    told = parser.parse_args()
    given = Given(told.model, told.output)
    if told.step:
        step = next(step for step in STEPS if step.name == told.step)
        run_inside(replace(step, timeout_s=told.limit or step.timeout_s), given)
        return 0
    outcomes = run_all(STEPS, given, Path(__file__), has_gpu, told.budget)
    about = {
        "kvr-mpi": version("kvr-mpi"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "model": told.model or "random weights",
    }
    print(f"\n{write_report(outcomes, about, Path(told.output))}")
    if any(outcome.status in ("failed", "timeout") for outcome in outcomes):
        return 1
    if not has_gpu():
        print(f"No GPU here: stopped before the first step that needs one ({STEPS[1].name}); exit code {NO_GPU}.")
        return NO_GPU
    return 0


if __name__ == "__main__":
    sys.exit(main())
