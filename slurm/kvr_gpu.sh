#!/bin/bash
# Test the GPUs of two nodes in half an hour: kvr doctor, bandwidth of every link, exactness, first tokens.
#
#     sbatch slurm/kvr_gpu.sh MODEL [more options of the benchmark first-token]
#
# MODEL: a folder on a shared file system. Run this from a clone of the repository; use `make test-gpu` for one node. The
# results are in the output of the job and in runs/gpu-JOB/.
#SBATCH --job-name=kvr-gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=00:40:00
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# SLURM runs a copy of this file; the other scripts are in the folder of the original, or in KVR_SLURM_DIR.
here=${KVR_SLURM_DIR:-$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=\(.*\)/kvr_[a-z]*\.sh.*|\1|p' | head -n 1)}
. "${here:-$SLURM_SUBMIT_DIR/slurm}/common.sh" || exit 78

if [ $# -eq 0 ]; then
    echo "usage: sbatch slurm/kvr_gpu.sh MODEL [more options of the benchmark first-token]" >&2
    exit 2
fi
model=$1
shift
cd "${here:-$SLURM_SUBMIT_DIR/slurm}/.." || exit 78
out=runs/gpu-$SLURM_JOB_ID
mkdir -p "$out"
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
worst=0
# try COMMAND...: run a step; the script continues if it fails.
try() {
    local code
    echo "$(date +'%F %T') $*"
    launch "$@"
    code=$?
    if [ "$code" -ne 0 ]; then
        echo "$(date +'%F %T') exit code $code: $*"
        worst=$code
    fi
}
try kvr doctor
for blocks in ${KVR_CTAS:-1 2 4 8 16}; do
    export NCCL_MAX_CTAS=$blocks
    try python -m benchmarks links --json "$out/links-$blocks.json"
done
unset NCCL_MAX_CTAS
try kvr verify --lengths 512,4096 --set "model.path=$model" --set model.dtype=bfloat16
try python -m benchmarks first-token --model "$model" --contexts 16k,64k --json "$out/first-token.json" "$@"
if try python tests/gpu/gpu_many.py "$model" "$out"; then # writes a job over documents of many lengths
    try kvr-run "$out/full/job.toml" --set parallel.memory_gib=6
fi
# Stop a rank on the first node; the other ranks on both nodes must end the job.
began=$SECONDS
launch python tests/programs/hanging_rank.py 10
code=$?
echo "a stopped rank: exit code $code after $((SECONDS - began)) s; expected: a code other than 0, within a minute"
if [ "$code" -eq 0 ]; then worst=1; fi
conclude "$worst"
