#!/bin/bash
# Measure the best slices for this machine and model, and write a lookup table.
#
#     sbatch --nodes=2 --ntasks-per-node=4 slurm/kvr_search.sh JOB.toml --contexts 8k,32k,128k
#SBATCH --job-name=kvr-search
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=02:00:00
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# SLURM runs a copy of this file; the other scripts are in the folder of the original, or in KVR_SLURM_DIR.
here=${KVR_SLURM_DIR:-$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\(.*\)/kvr_[a-z]*\.sh.*|\1|p' | head -n 1)}
. "${here:-$SLURM_SUBMIT_DIR/slurm}/common.sh" || exit 78

launch kvr search "$@"
conclude $?
