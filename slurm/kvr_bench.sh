#!/bin/bash
# KV-Runahead against its rivals, on the nodes that will do the work. First whether these are ready at all.
#
#     sbatch --nodes=1 --ntasks-per-node=4 slurm/kvr_bench.sh --model /models/mine --contexts 4k,32k --json bench.json
#SBATCH --job-name=kvr-bench
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=02:00:00
#SBATCH --exclusive
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# SLURM runs a copy of this file: the others are beside the original, or where kvr sbatch says.
here=${KVR_SLURM_DIR:-$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\(.*\)/kvr_[a-z]*\.sh.*|\1|p' | head -n 1)}
. "${here:-$SLURM_SUBMIT_DIR/slurm}/common.sh" || exit 78

launch kvr doctor
launch kvr bench "$@"
conclude $?
