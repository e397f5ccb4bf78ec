#!/bin/bash
# Merge the shares of a finished array into one file; `kvr sbatch --array` submits this. By hand:
#
#     sbatch --dependency=afterany:ARRAY slurm/kvr_gather.sh OUTPUT SHARES
#
# All records, keys and values are read and verified. Missing shares or documents are listed (exit code 65).
#SBATCH --job-name=kvr-gather
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --time=01:00:00
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# SLURM runs a copy of this file; the other scripts are in the folder of the original, or in KVR_SLURM_DIR.
here=${KVR_SLURM_DIR:-$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\(.*\)/kvr_[a-z]*\.sh.*|\1|p' | head -n 1)}
. "${here:-$SLURM_SUBMIT_DIR/slurm}/common.sh" || exit 78

if [ $# -ne 2 ]; then
    echo "usage: sbatch --dependency=afterany:ARRAY slurm/kvr_gather.sh OUTPUT SHARES" >&2
    exit 2
fi
output=$1
shares=("$output"/share-*-of-"$2")
"${within[@]}" kvr status "${shares[@]}"
"${within[@]}" kvr merge "${shares[@]}" --shares "$2" -o "$output/all.h5" --overwrite
conclude $?
