#!/bin/bash
# Process a corpus as an array of independent jobs: for queues that favor small jobs, and for very large corpora.
#
#     sbatch --array=0-99 slurm/kvr_array.sh JOB.toml [more options of kvr-run]
#     KVR_SHARES=50000 sbatch --array=0-999%50 slurm/kvr_array.sh JOB.toml
#
# Share i of n is the i-th of n equal parts of the corpus, with results in OUTPUT/share-i-of-n. KVR_SHARES is the number of
# shares (default: one per task). If it exceeds the number of tasks (MaxArraySize), tasks process several shares in turn.
#SBATCH --job-name=kvr-array
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR2@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.out

# SLURM runs a copy of this file; the other scripts are in the folder of the original, or in KVR_SLURM_DIR.
here=${KVR_SLURM_DIR:-$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\(.*\)/kvr_[a-z]*\.sh.*|\1|p' | head -n 1)}
. "${here:-$SLURM_SUBMIT_DIR/slurm}/common.sh" || exit 78

if [ $# -eq 0 ]; then
    echo "usage: sbatch --array=0-99 slurm/kvr_array.sh JOB.toml [more options of kvr-run]" >&2
    exit 2
fi
# The position of this task in the array, counted from 0.
tasks=${SLURM_ARRAY_TASK_COUNT:-1}
step=${SLURM_ARRAY_TASK_STEP:-1}
task=$(((${SLURM_ARRAY_TASK_ID:-0} - ${SLURM_ARRAY_TASK_MIN:-0}) / step))
shares=${KVR_SHARES:-$tasks}
if ! is_number "$shares" || [ "$shares" -lt 1 ]; then
    echo "KVR_SHARES=$shares: expected the number of shares of the corpus, at least 1" >&2
    exit 78
fi
output=$("${within[@]}" python3 - "$@" <<'END'
import sys
from pathlib import Path

from kvr_mpi.job import load_job

job, *rest = sys.argv[1:]
settings = [value for option, value in zip(rest, rest[1:]) if option == "--set"]
settings += [option.removeprefix("--set=") for option in rest if option.startswith("--set=")]
print(load_job(Path(job), settings)[0].output.path)
END
) || exit 78

worst=0
for ((share = task; share < shares; share += tasks)); do
    echo "$(date +'%F %T') share $share of $shares"
    launch kvr-run "$@" --set "documents.shard=\"$share/$shares\"" --set "output.path=\"$output/share-$share-of-$shares\""
    code=$?
    # Continue with other shares after error records, but not after other failures.
    if [ "$code" -ne 0 ] && [ "$code" -ne 65 ]; then conclude "$code"; fi
    if [ "$code" -gt "$worst" ]; then worst=$code; fi
done
conclude "$worst"
