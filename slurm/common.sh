# shellcheck shell=bash
# Functions of the job scripts, which source this file; it is never submitted. `launch` runs a command on all ranks of
# the job, and `conclude` ends the script and requeues a job that stopped early.

# Modules, environments and transports of this site; see site.sh.example.
if [ -r "${KVR_SITE:-$here/site.sh}" ]; then
    # shellcheck source=/dev/null
    . "${KVR_SITE:-$here/site.sh}"
elif [ -n "${KVR_SITE:-}" ]; then
    echo "KVR_SITE=$KVR_SITE cannot be read; expected a file like $here/site.sh.example" >&2
    exit 78
fi

# An environment in one file, so that the ranks of many nodes do not open thousands of small files on a shared file
# system. The archive is unpacked into a folder of the same name on each node, which appears when it is complete.
environment=
use_environment_file() {
    case $KVR_ENVIRONMENT_FILE in
        *.sif) KVR_CONTAINER=${KVR_CONTAINER:-apptainer exec --nv $KVR_ENVIRONMENT_FILE} ;;
        *)
            environment=${KVR_LOCAL:-/tmp}/kvr-environment-$(id -u)-$SLURM_JOB_ID
            echo "$(date +'%F %T') unpacking $KVR_ENVIRONMENT_FILE into $environment on each node"
            # shellcheck disable=SC2016
            srun --ntasks-per-node=1 mkdir -p "${KVR_LOCAL:-/tmp}" &&
                sbcast --force "$KVR_ENVIRONMENT_FILE" "$environment.tar" &&
                srun --ntasks-per-node=1 bash -c '
                    part=$1.$SLURM_PROCID
                    rm -rf "$part" && mkdir "$part" && tar -xf "$1.tar" -C "$part" || exit 1
                    # Scripts installed by pip start with the path of Python in the packed folder; replace it.
                    grep -lIZ "^#!.*/bin/python" "$part"/bin/* | xargs -0r sed -i "1s|^#!.*/bin/python[0-9.]*|#!$1/bin/python3|"
                    mv -T "$part" "$1" 2>/dev/null || rm -rf "$part"
                    test -x "$1/bin/kvr-run"' bash "$environment" || {
                echo "$KVR_ENVIRONMENT_FILE could not be unpacked into $environment on all nodes: set KVR_LOCAL to a folder" \
                    "with more space; the archive must have bin/kvr-run at its top: tar -C ENVIRONMENT -cf FILE.tar ." >&2
                exit 78
            }
            export PATH=$environment/bin:$PATH VIRTUAL_ENV=$environment
            ;;
    esac
}
remove_environment() {
    if [ -n "$environment" ]; then srun --ntasks-per-node=1 rm -rf "$environment" "$environment.tar" 2>/dev/null; fi
    environment=
}
if [ -n "${KVR_ENVIRONMENT_FILE:-}" ]; then
    trap remove_environment EXIT
    use_environment_file
fi
read -ra within <<<"${KVR_CONTAINER:-}" # such as: apptainer exec --nv kvr.sif
if [ -n "$environment" ]; then
    KVR_VENV=
elif [ -z "${KVR_VENV:-}" ] && ! command -v kvr >/dev/null; then
    KVR_VENV=$here/../.venv
fi
if [ -n "${KVR_VENV:-}" ] && [ -r "$KVR_VENV/bin/activate" ]; then
    # shellcheck source=/dev/null
    . "$KVR_VENV/bin/activate"
fi
if ! "${within[@]}" kvr --version; then
    echo "kvr-run does not start on $(hostname): set KVR_VENV, modules or KVR_CONTAINER in $here/site.sh" >&2
    exit 78
fi

is_number() { [[ ${1:-} =~ ^[0-9]+$ ]]; }

# The id of a task of an array; its plain number may be that of the whole array.
job_name() {
    if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
        echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    else
        echo "$SLURM_JOB_ID"
    fi
}

# Tell the ranks the time limit: some versions of SLURM do not set it, and a requeued job has a new one.
set_deadline() {
    local end
    end=$(date -d "$(squeue --noheader --jobs "$(job_name)" --format %e 2>/dev/null)" +%s 2>/dev/null)
    if is_number "$end" && [ "$end" -gt "$(date +%s)" ]; then
        export SLURM_JOB_END_TIME=$end
    elif ! is_number "${SLURM_JOB_END_TIME:-}" || [ "$SLURM_JOB_END_TIME" -le "$(date +%s)" ]; then
        unset SLURM_JOB_END_TIME # no limit, or one that cannot be
    fi
}

set_environment() {
    # Since SLURM 22.05, srun ignores sbatch's cores per task.
    if is_number "${SLURM_CPUS_PER_TASK:-}"; then
        export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}
    fi
    # Every rank sees all GPUs of its node and chooses one by its number there: CUDA IPC between two GPUs requires that
    # both processes see both.
    # (--gpu-bind=none does not work: under SLURM 22.05, ranks then see no GPU.)
    unset SLURM_GPU_BIND SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_NTASKS_PER_GPU
    export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} TRANSFORMERS_OFFLINE=${TRANSFORMERS_OFFLINE:-1}
    export PYTHONUNBUFFERED=1
    if [ -n "${KVR_LOCAL:-}" ]; then export KVR_LOCAL; fi
    # Loading a kernel at its first use would wait for an NCCL transfer, which may wait for this rank.
    export CUDA_MODULE_LOADING=${CUDA_MODULE_LOADING:-EAGER}
    # If NCCL hangs, each rank writes its last messages to a file in the submission folder.
    export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000} TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
    export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-$PWD/kvr-nccl-$(job_name)-rank-}
}

# The MPI that mpi4py loads determines the PMI that srun must use.
choose_mpi_type() {
    library=$("${within[@]}" python3 -m kvr_mpi.transport.mpi_query) || library="no MPI"
    local offered
    offered=$(srun --mpi=list 2>&1)
    case $library in
        *"Open MPI"*) mpi_type=pmix ;;
        *CRAY*) if [[ $offered == *cray_shasta* ]]; then mpi_type=cray_shasta; else mpi_type=pmi2; fi ;;
        *) mpi_type=pmi2 ;; # MPICH, MVAPICH, Intel MPI
    esac
    mpi_type=${KVR_MPI_TYPE:-$mpi_type}
    if [ -z "${KVR_LAUNCHER:-}" ] && ! grep -qw -- "$mpi_type" <<<"$offered"; then
        echo "srun does not support --mpi=$mpi_type, which $library needs; available: ${offered//$'\n'/ }. Set KVR_MPI_TYPE," \
            "or KVR_LAUNCHER (this MPI's own mpirun), in $here/site.sh" >&2
        exit 69
    fi
}

record() {
    echo "$(date +'%F %T') job $(job_name) on ${SLURM_JOB_NUM_NODES:-?} nodes ${SLURM_JOB_NODELIST:-?}, ${SLURM_NTASKS:-?}" \
        "tasks, ${SLURM_CPUS_PER_TASK:-?} cores each, restarts: ${SLURM_RESTART_COUNT:-0}"
    "${within[@]}" python3 --version
    echo "$library; $(srun --version); launched by ${KVR_LAUNCHER:-srun --mpi=$mpi_type}"
    if is_number "${SLURM_JOB_END_TIME:-}"; then
        echo "time limit: $(date -d "@$SLURM_JOB_END_TIME" +'%F %T')"
    fi
}

# Resources used by this attempt; many sites provide no accounting.
spent() {
    local cores=0 part count of
    for part in $(tr ',' ' ' <<<"${SLURM_JOB_CPUS_PER_NODE:-}"); do # such as 16(x3),8
        count=${part%%"("*}
        of=1
        if [[ $part == *"(x"*")" ]]; then of=${part##*"(x"}; fi
        of=${of%")"}
        if is_number "$count" && is_number "$of"; then cores=$((cores + count * of)); fi
    done
    awk -v s="$SECONDS" -v nodes="${SLURM_JOB_NUM_NODES:-1}" -v gpus="${SLURM_GPUS_ON_NODE:-0}" -v cores="$cores" -v now="$(date +'%F %T')" \
        'BEGIN { printf "%s used %d s on %d %s: %.3g node hours, %.3g GPU hours, %.3g core hours\n", now, s, nodes,
                 nodes == 1 ? "node" : "nodes",
                 s * nodes / 3600, s * nodes * gpus / 3600, s * cores / 3600 }'
}
trap 'remove_environment; spent' EXIT

# Stop signal: from SLURM before the time limit (--signal in the header of the script), or from a user.
child=
stopping=
stop() {
    stopping=yes
    echo "$(date +'%F %T') stop signal received; the ranks finish their documents"
    if [ -n "$child" ]; then kill -USR2 "$child" 2>/dev/null; fi
}
trap stop USR2
# SLURM ends the ranks itself; this script must outlive them to report the outcome.
trap 'stopping=yes' TERM

# launch COMMAND...: run it on all ranks, and return its exit code; 75 if it was stopped because of the time limit.
# If a rank dies, the others are killed after 6 s; --kill-on-bad-exit would first wait KillWait seconds.
launch() {
    if [ -n "$stopping" ]; then return 75; fi
    local launcher code
    read -ra launcher <<<"${KVR_LAUNCHER:-srun --mpi=$mpi_type --kill-on-bad-exit=0 --wait=6}"
    "${launcher[@]}" "${within[@]}" "$@" </dev/null &
    child=$!
    # A signal interrupts `wait`, but not the child.
    while wait "$child"; code=$?; kill -0 "$child" 2>/dev/null; do :; done
    child=
    # Signals kill ranks that have no handler yet; no results are lost.
    if [ -n "$stopping" ] && [ "$code" -gt 128 ]; then code=75; fi
    return "$code"
}

# conclude CODE: exit with it; a job that stopped early is requeued, up to KVR_MAX_REQUEUES times.
conclude() {
    local restarts=${SLURM_RESTART_COUNT:-0} most=${KVR_MAX_REQUEUES:-20} state
    is_number "$restarts" || restarts=0
    is_number "$most" || most=20
    if [ "$1" -ne 75 ]; then exit "$1"; fi
    remove_environment
    state=$(squeue --noheader --jobs "$(job_name)" --format %T 2>/dev/null)
    if [ "$state" != RUNNING ]; then
        echo "stopped early, state ${state:-unknown}: the job was canceled or preempted; not requeueing it here"
    elif [ "$restarts" -ge "$most" ]; then
        echo "stopped early after $restarts restarts (KVR_MAX_REQUEUES=$most): submit it again with --resume"
    elif scontrol requeue "$(job_name)"; then
        echo "$(date +'%F %T') stopped early; requeued"
    else
        echo "stopped early, but SLURM cannot requeue it: submit it again with --resume"
    fi
    exit 75
}

set_deadline
set_environment
choose_mpi_type
record
