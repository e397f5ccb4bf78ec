#!/bin/bash
# The main job: process every document of a corpus on all ranks of this allocation.
#
#     sbatch slurm/kvr_prefill.sh JOB.toml [more options of kvr-run]
#     sbatch --nodes=4 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=16 slurm/kvr_prefill.sh jobs/summarize.toml
#
# Use one rank per GPU, or per few cores. Options on the command line of sbatch override the lines below. Put site-wide
# settings into slurm/site.sh. `kvr sbatch JOB.toml` fills in nodes, ranks and time from the plan.
# A job that stops early is requeued and resumes (slurm/README.md).
#SBATCH --job-name=kvr
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR2@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# SLURM runs a copy of this file; the other scripts are in the folder of the original, or in KVR_SLURM_DIR.
here=${KVR_SLURM_DIR:-$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\(.*\)/kvr_[a-z]*\.sh.*|\1|p' | head -n 1)}
. "${here:-$SLURM_SUBMIT_DIR/slurm}/common.sh" || exit 78

if [ $# -eq 0 ]; then
    echo "usage: sbatch slurm/kvr_prefill.sh JOB.toml [more options of kvr-run]" >&2
    exit 2
fi
launch kvr-run "$@"
conclude $?
