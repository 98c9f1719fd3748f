# shellcheck shell=bash
# The rank script: one per node, on the host, the parent of the container. A contained
# process cannot see SLURM_*. Diagnostics go to stderr, which srun carries to the batch
# script; what the engine prints goes to the rank's own files.
set -u
umask 077

RANK=$SLURM_PROCID
NODE=${SLURMD_NODENAME:-$(uname -n)}
SECONDS=0
STOPPING=0
CHILD=

# A line of the job's own log, through the batch script.
say() { # MESSAGE
    printf 'LLMHUB-SAY %s\n' "$1" >&2
}

refuse() { # MESSAGE
    printf 'LLMHUB-REFUSED rank=%s node=%s: %s\n' "$RANK" "$NODE" "$1" >&2
    exit 1
}

# A step without GPUs would load the model on the CPU, or die after minutes.
check_gpus() {
    local devices
    # NoDevFiles is Slurm's word for none
    if [ -z "${CUDA_VISIBLE_DEVICES-}" ] || [ "$CUDA_VISIBLE_DEVICES" = NoDevFiles ]; then
        refuse "rank $RANK on $NODE has no GPUs: CUDA_VISIBLE_DEVICES is ${CUDA_VISIBLE_DEVICES:-not set} in the step; check the job's --gres"
    fi
    IFS=, read -r -a devices <<<"$CUDA_VISIBLE_DEVICES"
    if [ "${#devices[@]}" -lt "$PLAN_GPUS_PER_NODE" ]; then
        refuse "rank $RANK on $NODE has ${#devices[@]} GPU(s) ($CUDA_VISIBLE_DEVICES), planned $PLAN_GPUS_PER_NODE; check the job's --gres"
    fi
}

find_fabric() { # sets FABRIC_NAMES, FABRIC_ADDRESS, FABRIC_IFACE
    local name address
    FABRIC_NAMES=
    FABRIC_IFACE=
    FABRIC_ADDRESS=
    while read -r name address; do
        FABRIC_NAMES+=${FABRIC_NAMES:+,}$name
        if [ "$RANK" -eq 0 ] && [ "${address%/*}" = "$LLMHUB_MASTER_ADDR" ] || [ -z "$FABRIC_IFACE" ]; then
            FABRIC_IFACE=$name
            FABRIC_ADDRESS=${address%/*}
        fi
    done < <(llmhub_fabric "$PLAN_HSN_IFACE")
    if [ -z "$FABRIC_IFACE" ]; then
        refuse "no routable fabric IPv4 on $NODE (rank $RANK): no interface ${PLAN_HSN_IFACE}<n> has one; set LLMHUB_MN_HSN_IFACE"
    fi
    if [ "$RANK" -eq 0 ] && [ "$FABRIC_ADDRESS" != "$LLMHUB_MASTER_ADDR" ]; then
        refuse "rank 0 runs on $NODE ($FABRIC_ADDRESS), which does not hold the master address $LLMHUB_MASTER_ADDR"
    fi
}

mark_started() {
    local marker=$LLMHUB_ATTEMPT_DIR/started/$RANK
    # renamed into place: a marker is never seen half written
    if ! { printf '%s\n' "$NODE" >"$marker.new" && mv -- "$marker.new" "$marker"; } 2>/dev/null; then
        refuse "rank $RANK on $NODE cannot write $marker; is the log directory on shared storage, writable and not full?"
    fi
}

# The batch script writes one line to the step's stdin when every rank is up: no rank
# polls the shared file system. Wall clock, and a little longer than the batch script
# waits, so that it is the one to report.
await_all_ranks() {
    local word
    if ! read -r -t $((PLAN_RANK_START_TIMEOUT + 30)) word || [ "$word" != go ]; then
        refuse "rank $RANK on $NODE: not all $PLAN_NNODES ranks started within ${PLAN_RANK_START_TIMEOUT}s"
    fi
}

# Apptainer evaluates a value inside double quotes when the container starts; escaped,
# it arrives as it is. Its own no-eval mode would pass the escapes on.
export_to_container() { # NAME VALUE
    local value=$2
    value=${value//\\/\\\\}
    value=${value//\$/\\\$}
    value=${value//\`/\\\`}
    export "APPTAINERENV_$1=$value"
}

# A level or file that the job's env or the host names is kept; REPLY is its value.
named_for_container() { # NAME
    local i apptainer=APPTAINERENV_$1 singularity=SINGULARITYENV_$1
    for i in "${!PLAN_ENV_NAMES[@]}"; do
        if [ "${PLAN_ENV_NAMES[i]}" = "$1" ]; then
            llmhub_expand "${PLAN_ENV_VALUES[i]}"
            return 0
        fi
    done
    REPLY=${!apptainer-${!singularity-${!1-}}}
    [ -n "$REPLY" ]
}

set_nccl_debug() {
    local directory=$LLMHUB_JOB_DIR/nccl-debug
    if named_for_container NCCL_DEBUG; then
        export_to_container NCCL_DEBUG "$REPLY"
        if named_for_container NCCL_DEBUG_SUBSYS; then
            export_to_container NCCL_DEBUG_SUBSYS "$REPLY"
        fi
    else
        export_to_container NCCL_DEBUG INFO
        export_to_container NCCL_DEBUG_SUBSYS INIT,NET
    fi
    if named_for_container NCCL_DEBUG_FILE; then
        export_to_container NCCL_DEBUG_FILE "$REPLY"
    else
        # never stderr: NCCL's lines would be taken for the job's own
        mkdir -p -- "$directory"
        add_bind "$directory"
        export_to_container NCCL_DEBUG_FILE "$directory/%h.%p"
    fi
}

add_bind() { # DIRECTORY
    export APPTAINER_BINDPATH="${APPTAINER_BINDPATH:+$APPTAINER_BINDPATH,}$1"
}

# Apptainer binds the path it is given, not what a symlink on the way points at.
set_cache() { # NAME VALUE
    local resolved
    resolved=$(realpath -m -- "$2")
    if [ "$resolved" != "$2" ] && [ -d "$resolved" ]; then
        add_bind "$resolved"
        export_to_container "$1" "$resolved"
    else
        export_to_container "$1" "$2"
    fi
}

set_container_env() {
    local i name
    unset APPTAINER_NO_EVAL SINGULARITY_NO_EVAL
    for name in "${PLAN_RANK_ENV[@]}"; do
        unset "APPTAINERENV_$name" "SINGULARITYENV_$name"
    done
    export_to_container CUDA_VISIBLE_DEVICES "$CUDA_VISIBLE_DEVICES"
    # on, it deadlocks across nodes while the engine starts
    export_to_container VLLM_ALLREDUCE_USE_SYMM_MEM "$PLAN_SYMM_MEM"
    # compile caches shared between nodes race at a cold start
    mkdir -p -- "$LLMHUB_CACHE_DIR/rank-$RANK/triton"
    add_bind "$LLMHUB_CACHE_DIR/rank-$RANK"
    export_to_container TRITON_CACHE_DIR "$LLMHUB_CACHE_DIR/rank-$RANK/triton"
    for i in "${!PLAN_ENV_NAMES[@]}"; do
        name=${PLAN_ENV_NAMES[i]}
        llmhub_expand "${PLAN_ENV_VALUES[i]}"
        case $name in
            HF_HOME | HF_HUB_CACHE | HUGGINGFACE_HUB_CACHE | HF_DATASETS_CACHE | \
                HF_XET_CACHE | TRANSFORMERS_CACHE | XDG_CACHE_HOME | TORCH_HOME | \
                TORCHINDUCTOR_CACHE_DIR | TRITON_CACHE_DIR | VLLM_CACHE_ROOT | \
                VLLM_ASSETS_CACHE | FLASHINFER_WORKSPACE_BASE)
                set_cache "$name" "$REPLY"
                ;;
            *) export_to_container "$name" "$REPLY" ;;
        esac
    done
    export_to_container VLLM_HOST_IP "$FABRIC_ADDRESS"
    # NCCL reads a plain name as a prefix: hsn0 would take hsn0.561 in again
    export_to_container NCCL_SOCKET_IFNAME "${PLAN_NCCL_SOCKET_IFNAME:-=$FABRIC_NAMES}"
    export_to_container GLOO_SOCKET_IFNAME "$FABRIC_IFACE"
    set_nccl_debug
}

# Prints the versions of vLLM that are installed beside the container's vllm command, by
# the names of their metadata folders: `vllm --version` would load all of torch.
# shellcheck disable=SC2016 # the container's shell expands it
PROBE='
command=$(readlink -f "$(command -v vllm)")
for info in "${command%/bin/*}"/lib*/python3*/*-packages/vllm-*.dist-info; do
    [ ! -d "$info" ] || basename "${info##*/vllm-}" .dist-info
done
'

# False for what cannot be compared: a build of some commit, a version of a form not known.
is_older() { # VERSION FIRST
    local release=${1%%[!0-9.]*}
    [[ $1 =~ ^[0-9]+\.[0-9] && $1 != *dev* ]] && ! printf '%s\n' "$2" "${release%.}" | sort -C -V
}

# Only a version that is known to be too old ends the job; it does so while the other
# ranks start, long before weights are read.
check_vllm() {
    local version image=${PLAN_CONTAINER[-1]}
    version=$(timeout -k 2 10 "${PLAN_CONTAINER[@]}" sh -c "$PROBE" </dev/null 2>/dev/null | sort -u)
    # lib64 may be lib under another name, hence sort -u; two versions tell nothing
    if [[ ! $version =~ ^[^[:space:]]+$ ]]; then
        say "WARN: cannot tell the version of vLLM in $image; it must be $PLAN_MIN_VLLM or newer"
    elif is_older "$version" "$PLAN_MIN_VLLM"; then
        refuse "vLLM $version in $image cannot serve over several nodes; the first version that can is $PLAN_MIN_VLLM: name a newer image in vec-inf's environment.yaml"
    else
        say "TOPOLOGY: vllm $version"
    fi
}

# shellcheck disable=SC2317 # called by the trap
# On a signal: the container is told. Whether its end is a failure, only the batch script
# knows.
forward_signal() {
    STOPPING=1
    # still at the barrier: nothing to tell, and nobody to wait for
    [ -n "$CHILD" ] || exit 143
    kill -TERM "$CHILD" 2>/dev/null
}

run_container() { # sets STATUS
    local log=$LLMHUB_JOB_DIR/ranks/rank-$RANK.$NODE
    local -a serve=(
        "${PLAN_CONTAINER[@]}" env -u FI_LOG_LEVEL vllm serve "$PLAN_MODEL"
    )
    if [ "$RANK" -eq 0 ]; then
        serve+=(
            --served-model-name "$PLAN_MODEL_NAME" --host 0.0.0.0 --port "$LLMHUB_SERVER_PORT"
            "${PLAN_HEAD_ARGS[@]}"
        )
    else
        serve+=(--headless)
    fi
    serve+=(
        "${PLAN_ENGINE_ARGS[@]}"
        --nnodes "$PLAN_NNODES" --node-rank "$RANK"
        --master-addr "$LLMHUB_MASTER_ADDR" --master-port "$LLMHUB_MASTER_PORT"
        --distributed-executor-backend mp
    )
    # not exec: this script outlives the container and says how it ended
    (
        exec 2>>"$log.err" </dev/null {LLMHUB_NAP}>&-
        umask "$LLMHUB_UMASK"
        exec "${serve[@]}"
    ) > >(
        # a signal to the whole step must not cut the log before the engine's last word
        trap '' TERM INT HUP
        exec tee -a -- "$log.out"
    ) &
    CHILD=$!
    # ends the container if this script is killed: orphans would serve on, and hold the
    # step's output open, so that Slurm reports nothing for a minute
    exec {LIFELINE}> >(
        trap '' TERM INT HUP
        read -r _ || kill -KILL "$CHILD" 2>/dev/null
    )
    while :; do
        wait "$CHILD"
        STATUS=$?
        kill -0 "$CHILD" 2>/dev/null || break
        await_child
    done
    printf 'over\n' >&"$LIFELINE"
}

# After a signal: a job that is cancelled gives its engine time to stop (about 4 s), one
# that has failed does not; the batch script says which on the step's stdin.
await_child() {
    local word=
    while kill -0 "$CHILD" 2>/dev/null; do
        read -r -t 0.2 word
        if [ "$word" = kill ]; then
            kill -KILL "$CHILD" 2>/dev/null
            return 0
        fi
        # at end of file, read does not wait
        llmhub_nap 0.1
    done
}

report_end() {
    local seconds=$SECONDS ended_at
    ended_at=$(date +%s.%3N)
    # signals reach a step's processes one by one: the container may have been first. And
    # srun ends the other ranks as soon as this one exits: one that is failing of the same
    # cause gets the time to say so.
    [ "$STOPPING" -eq 1 ] || llmhub_nap 0.7
    printf 'LLMHUB-END rank=%s node=%s status=%s seconds=%s at=%s stopping=%s\n' \
        "$RANK" "$NODE" "$STATUS" "$seconds" "$ended_at" "$STOPPING" >&2
    if [ "$STATUS" -eq 0 ]; then
        # vLLM ends with 0 after it has lost a worker, and after a signal that only this
        # node got; srun must see a failure
        STATUS=$((STOPPING ? 143 : 1))
    fi
}

llmhub_read_env
llmhub_open_nap
trap forward_signal TERM INT HUP
check_gpus
find_fabric
mark_started
set_container_env
[ "$RANK" -ne 0 ] || check_vllm
await_all_ranks
run_container
report_end
exit "$STATUS"
