# shellcheck shell=bash
# shellcheck disable=SC2154 # vec-inf's setup assigns server_port_number, server_address
# The batch script's functions. Runs on the first node of the allocation, which is
# rank 0's. Only llmhub_say and llmhub_fail write to the job's .out and .err: vec-inf
# decides the status from every line of .err.
set -u

LLMHUB_SRUN=
LLMHUB_RANK_FAILED=0
LLMHUB_READY=0
LLMHUB_RESTARTS=0
LLMHUB_LOCK=
LLMHUB_PARTIAL=

llmhub_say() { # MESSAGE
    printf 'LLMHUB-%s\n' "$1" >&3
}

# One line of the attempt's story: seconds since the epoch, then what happened.
llmhub_mark() { # EVENT
    printf '%(%s)T %s\n' -1 "$1" >>"$LLMHUB_ATTEMPT_DIR/timeline"
}

# Ends the job with a reason, in both logs and in failure.json; or, when the server was
# ready and a restart is left, ends the step only and returns.
llmhub_fail() { # MESSAGE [RANK NODE STATUS SIGNAL SECONDS CAUSE LOG]
    if [ "$LLMHUB_READY" -eq 1 ] && [ "$LLMHUB_RESTARTS" -lt "$PLAN_MAX_RESTARTS" ]; then
        LLMHUB_RESTARTS=$((LLMHUB_RESTARTS + 1))
        llmhub_say "RESTART: $LLMHUB_RESTARTS of $PLAN_MAX_RESTARTS: $1"
        llmhub_mark "restart $1"
        llmhub_end_step
        return 0
    fi
    # whoever sees the failure may cancel the job at once; its account is still whole
    trap '' TERM INT HUP
    # first: whoever reads the line finds the record
    llmhub_write_failure "$@"
    llmhub_say "ERROR: $1"
    printf 'LLMHUB-ERROR: %s\n' "$1" >&4
    if [ -n "${8-}" ] && [ -r "$8" ]; then
        # vec-inf takes the last line that looks like an error for the reason; it skips
        # lines that say "userwarning"
        tail -n 50 -- "$8" | sed 's/^/LLMHUB-TAIL (userwarning): /' >&4
    fi
    llmhub_end_step
    exit 1
}

llmhub_write_failure() { # the arguments of llmhub_fail
    local file=$LLMHUB_JOB_DIR/failure.json
    jq -n --arg message "$1" --arg rank "${2-}" --arg node "${3-}" --arg status "${4-}" \
        --arg signal "${5-}" --arg seconds "${6-}" --arg cause "${7-}" --arg log "${8-}" \
        --arg attempt "${LLMHUB_ATTEMPT_DIR##*/}" --argjson time "$(date +%s)" \
        'def number: if . == "" then null else tonumber end;
         def text: if . == "" then null else . end;
         {message: $message, rank: ($rank | number), node: ($node | text),
          status: ($status | number), signal: ($signal | number),
          seconds: ($seconds | number), cause: ($cause | text), log: ($log | text),
          attempt: ($attempt | text), time: $time}' >"$file.new" && mv -- "$file.new" "$file"
}

# Reads one line of what srun says, for at most SECONDS; false when the step has ended.
# srun's stderr carries every rank's own report, in order, without a poll.
llmhub_listen() { # SECONDS
    local line status
    read -r -t "$1" -u "$LLMHUB_STEP_SAYS" line
    status=$?
    # a line may come in pieces, and the last one without its end
    LLMHUB_PARTIAL+=$line
    [ "$status" -le 128 ] || return 0
    [ "$status" -eq 0 ] || [ -n "$LLMHUB_PARTIAL" ] || return 1
    line=$LLMHUB_PARTIAL
    LLMHUB_PARTIAL=
    printf '%s\n' "$line" >>"$LLMHUB_ATTEMPT_DIR/step.log"
    case $line in
        *LLMHUB-REFUSED* | *LLMHUB-END*stopping=0* | 'srun: error: '*': task'*)
            LLMHUB_RANK_FAILED=1
            ;;
        *'LLMHUB-SAY '*) llmhub_say "${line#*LLMHUB-SAY }" ;;
    esac
}

# Listens for SECONDS, or until the step has ended.
llmhub_listen_until() { # SECONDS
    local end=$((SECONDS + $1))
    while [ "$SECONDS" -lt "$end" ] && llmhub_listen 0.5; do :; done
}

# Ends the step on every node, at once: what is left after a failure holds nothing worth
# saving. Slurm alone would wait for its KillWait (30 s by default) before it kills.
llmhub_end_step() {
    [ -n "$LLMHUB_SRUN" ] || return 0
    kill -0 "$LLMHUB_SRUN" 2>/dev/null || return 0
    printf 'kill\n' >&"$LLMHUB_STEP_STDIN"
    kill -TERM "$LLMHUB_SRUN"
    llmhub_listen_until 5
}

# vec-inf's port search, ended in the middle, leaves an nc that has no parent any more:
# Slurm finds it only where it tracks processes by cgroup.
# shellcheck disable=SC2317 # called by the trap
llmhub_end_port_search() {
    local stat fields
    read -r stat <"/proc/$$/stat"
    # after the name, which may hold anything: state, parent, process group
    read -ra fields <<<"${stat##*) }"
    # Slurm makes the script the leader of its group; another's group is left alone
    [ "${fields[2]}" != "$$" ] || kill -TERM 0
}

# Cancelled, out of time or requeued: Slurm has told every rank itself; no failure.
# shellcheck disable=SC2317 # called by the trap
llmhub_stop() {
    trap '' TERM INT HUP
    [ -z "$LLMHUB_ATTEMPT_DIR" ] || llmhub_mark stopped
    if [ -n "$LLMHUB_SRUN" ]; then
        llmhub_listen_until 20
        llmhub_end_step
    else
        llmhub_end_port_search
    fi
    exit 143
}

# A hub that itself runs in a Slurm job passes that job's variables on, and srun reads
# them as options.
llmhub_forget_outer_job() {
    local name
    for name in "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}" "${!SLURM_GPU@}" \
        "${!SLURM_NTASKS_PER@}" "${!SLURM_STEP@}" "${!SLURM_SRUN@}" "${!SRUN_@}" \
        SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_CPUS_PER_GPU SLURM_TRES_PER_TASK \
        SLURM_HINT SLURM_THREADS_PER_CORE SLURM_CORE_SPEC SLURM_THREAD_SPEC \
        SLURM_EXACT SLURM_EXCLUSIVE SLURM_OVERCOMMIT SLURM_WHOLE SLURM_DISTRIBUTION \
        SLURM_HOSTFILE SLURM_EXPORT_ENV SLURM_GRES SLURM_GRES_FLAGS SLURM_WAIT \
        SLURM_KILL_BAD_EXIT SLURM_TIMELIMIT SLURM_IMMEDIATE SLURM_MULTI_PROG \
        SLURM_LABELIO SLURM_UNBUFFEREDIO SLURM_STDINMODE SLURM_STDOUTMODE \
        SLURM_STDERRMODE SLURM_OPEN_MODE SLURM_CLUSTERS; do
        unset "$name"
    done
}

# The first free ATTEMPT directory: a requeued job keeps its id, and nothing of an
# earlier attempt may be seen.
llmhub_make_attempt() {
    local number=${SLURM_RESTART_COUNT:-0}
    while [ -e "$LLMHUB_JOB_DIR/attempt-$number" ]; do
        number=$((number + 1))
    done
    LLMHUB_ATTEMPT=$number
    LLMHUB_ATTEMPT_DIR=$LLMHUB_JOB_DIR/attempt-$number
    if [ -e "$LLMHUB_JOB_DIR/ranks" ]; then
        mv -- "$LLMHUB_JOB_DIR/ranks" "$LLMHUB_JOB_DIR/ranks.before-attempt-$number"
    fi
    mkdir -p -- "$LLMHUB_ATTEMPT_DIR/started" "$LLMHUB_JOB_DIR/ranks" ||
        llmhub_fail "cannot make $LLMHUB_ATTEMPT_DIR; is the log directory writable and not full?"
    llmhub_mark "started on $SLURM_JOB_NODELIST"
}

llmhub_find_master() {
    local name address
    LLMHUB_FABRIC=$(llmhub_fabric "$PLAN_HSN_IFACE")
    read -r name address <<<"$LLMHUB_FABRIC"
    if [ -z "$name" ]; then
        llmhub_fail "no routable fabric IPv4 on $LLMHUB_HEAD_NODE: no interface ${PLAN_HSN_IFACE}<n> has one; set LLMHUB_MN_HSN_IFACE"
    fi
    LLMHUB_MASTER_ADDR=${address%/*}
}

# Holds the lock for the life of this process; false if another job has it.
llmhub_lock_port() { # PORT
    local directory=/tmp/llmhub-mn-ports file
    file=$directory/$1
    # world-writable like /tmp: jobs of every user take part
    (umask 0 && mkdir -m 1777 -- "$directory") 2>/dev/null
    # noclobber: never through a symlink that somebody else put there
    [ -e "$file" ] || (umask 0 && set -o noclobber && : >"$file") 2>/dev/null
    { exec {LLMHUB_LOCK}<"$file"; } 2>/dev/null || return 0
    flock -n "$LLMHUB_LOCK" && return 0
    exec {LLMHUB_LOCK}<&-
    LLMHUB_LOCK=
    return 1
}

# A rank of one job was seen to join another job through a shared port: each job and
# attempt starts its search elsewhere, and holds what it found.
llmhub_find_port() {
    local low=32768 high=60999 used=' ' count=$((PLAN_PORT_SCAN_MAX + 1)) i port
    [ -z "$LLMHUB_LOCK" ] || exec {LLMHUB_LOCK}<&-
    LLMHUB_LOCK=
    read -r low high </proc/sys/net/ipv4/ip_local_port_range
    if command -v ss >/dev/null; then
        used=" $(ss -Htan | awk '{n = split($4, part, ":"); printf "%s ", part[n]}')"
    else
        llmhub_say "WARN: ss not found on $LLMHUB_HEAD_NODE; cannot tell which ports are in use"
    fi
    for ((i = 0; i < count; i++)); do
        port=$((PLAN_RDZV_PORT + (SLURM_JOB_ID + LLMHUB_ATTEMPT + i) % count))
        if [ "$port" -ge "$low" ] && [ "$port" -le "$high" ]; then continue; fi
        if [ "$port" = "$server_port_number" ]; then continue; fi
        case $used in *" $port "*) continue ;; esac
        llmhub_lock_port "$port" || continue
        LLMHUB_MASTER_PORT=$port
        return 0
    done
    llmhub_fail "no free rendezvous port from $PLAN_RDZV_PORT to $((PLAN_RDZV_PORT + count - 1)) on $LLMHUB_HEAD_NODE (in use, held by another job, or in the kernel's ephemeral range $low-$high); set LLMHUB_MN_RDZV_PORT"
}

# Seconds left of the walltime; nothing if it is unlimited or unknown.
llmhub_seconds_left() {
    local left parts part days=0 seconds=0
    if [[ ${SLURM_JOB_END_TIME-} =~ ^[0-9]+$ ]]; then
        printf '%s\n' $((SLURM_JOB_END_TIME - $(date +%s)))
        return 0
    fi
    left=$(squeue -h -j "$SLURM_JOB_ID" -o %L)
    [[ $left =~ ^([0-9]+-)?[0-9]+(:[0-9]+)*$ ]] || return 0
    case $left in
        *-*) days=${left%%-*} left=${left#*-} ;;
    esac
    IFS=: read -r -a parts <<<"$left"
    for part in "${parts[@]}"; do
        seconds=$((seconds * 60 + 10#$part))
    done
    printf '%s\n' $((10#$days * 86400 + seconds))
}

# A budget that the walltime cuts short would end the job without a reason.
llmhub_readiness_budget() {
    local left
    LLMHUB_BUDGET=$PLAN_SERVER_TIMEOUT
    left=$(llmhub_seconds_left)
    [ -z "$left" ] || [ "$left" -ge 10 ] || left=10
    if [ -n "$left" ] && [ "$LLMHUB_BUDGET" -gt $((left * 9 / 10)) ]; then
        LLMHUB_BUDGET=$((left * 9 / 10))
        llmhub_say "WARN: budget ${PLAN_SERVER_TIMEOUT}s exceeds the allocation; clamping to ${LLMHUB_BUDGET}s"
    fi
}

llmhub_say_topology() {
    local names='' name address
    llmhub_say "TOPOLOGY: nnodes=$PLAN_NNODES tp=$PLAN_TP pp=$PLAN_PP${PLAN_OTHER_AXES:+ $PLAN_OTHER_AXES} world=$PLAN_WORLD_SIZE master=$LLMHUB_MASTER_ADDR:$LLMHUB_MASTER_PORT"
    while read -r name address; do
        llmhub_say "TOPOLOGY: iface $name $address"
        names+=${names:+,}$name
    done <<<"$LLMHUB_FABRIC"
    llmhub_say "TOPOLOGY: nccl_socket_ifname=${PLAN_NCCL_SOCKET_IFNAME:-=$names}"
    llmhub_say "TOPOLOGY: readiness_budget=${LLMHUB_BUDGET}s"
    llmhub_say "TOPOLOGY: sizes $PLAN_ORIGINS"
    for name in "${PLAN_ENV_LEFT_OUT[@]}"; do
        llmhub_say "WARN: $name of the deployment env is left out: each rank has its own"
    done
}

# Everything before vec-inf's own setup.
llmhub_prepare() {
    LLMHUB_UMASK=$(umask)
    umask 077
    exec 3>&1 4>&2
    LLMHUB_HEAD_NODE=${SLURMD_NODENAME:-$(uname -n)}
    LLMHUB_JOB_DIR=$PLAN_LOG_DIR/$PLAN_MODEL_NAME.$SLURM_JOB_ID
    LLMHUB_ATTEMPT_DIR=
    llmhub_read_env
    llmhub_open_nap
    mkdir -p -- "$LLMHUB_JOB_DIR"
    exec 2>>"$LLMHUB_JOB_DIR/batch.log"
    trap llmhub_stop TERM INT HUP
    # a write to a step that has just ended must not end this script too; not ignored,
    # so that srun and the ranks get the default
    trap : PIPE
    llmhub_forget_outer_job
    if [ "$SLURM_JOB_NUM_NODES" -ne "$PLAN_NNODES" ]; then
        llmhub_fail "allocation has $SLURM_JOB_NUM_NODES node(s), expected $PLAN_NNODES; something changed --nodes after planning"
    fi
    rm -f -- "$LLMHUB_JOB_DIR/failure.json"
    # without it vec-inf's port search tries every port, for more than an hour
    command -v nc >/dev/null || llmhub_fail "nc not found on $LLMHUB_HEAD_NODE; vec-inf's port search needs it"
    llmhub_make_attempt
    llmhub_find_master
    llmhub_expand "$PLAN_BIND"
    # an unset variable leaves an entry without a source, which Apptainer refuses
    PLAN_BIND=$(printf '%s' "$REPLY" | awk -v RS=, '/^[^:]/ { printf "%s%s", comma, $0; comma = "," }')
    llmhub_expand "$PLAN_WORK_DIR"
    PLAN_WORK_DIR=$REPLY
    LLMHUB_CACHE_DIR=$PLAN_WORK_DIR/.vec-inf-cache/vec-inf-multinode/$PLAN_MODEL_NAME
    # vec-inf's setup and a site's module command use variables that may be unset
    set +u
}

# vec-inf has tried to publish the address; a server at an address that nobody knows is
# of no use.
llmhub_publish_address() {
    local i json=$LLMHUB_JOB_DIR/$PLAN_MODEL_NAME.$SLURM_JOB_ID.json
    for ((i = 0; i < 15; i++)); do
        jq -e --arg address "$server_address" '.server_address == $address' "$json" >/dev/null && return 0
        jq --arg address "$server_address" '. + {server_address: $address}' "$json" >"$json.tmp" &&
            mv -- "$json.tmp" "$json" && continue
        llmhub_nap 2
    done
    llmhub_fail "could not write the server address to $json; is the log directory writable and not full?"
}

llmhub_start_step() {
    local script=$LLMHUB_ATTEMPT_DIR/rank.sh cpus=()
    llmhub_rank_script >"$script" ||
        llmhub_fail "cannot write $script; is the log directory writable and not full?"
    # Slurm >= 22.05 does not pass the job's --cpus-per-task on to srun
    [ -z "${SLURM_CPUS_PER_TASK-}" ] || cpus=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
    export LLMHUB_UMASK LLMHUB_JOB_DIR LLMHUB_CACHE_DIR LLMHUB_ATTEMPT_DIR
    export LLMHUB_MASTER_ADDR LLMHUB_MASTER_PORT LLMHUB_SERVER_PORT=$server_port_number
    coproc LLMHUB_CO {
        exec srun --nodes="$PLAN_NNODES" --ntasks="$PLAN_NNODES" --ntasks-per-node=1 \
            --kill-on-bad-exit=1 --distribution=block "${cpus[@]}" --cpu-bind=none \
            --export=ALL --label bash "$script" 2>&1 >&3
    }
    # bash unsets a coprocess's own variables when it has ended
    LLMHUB_SRUN=$LLMHUB_CO_PID
    exec {LLMHUB_STEP_SAYS}<&"${LLMHUB_CO[0]}" {LLMHUB_STEP_STDIN}>&"${LLMHUB_CO[1]}"
    SECONDS=0
}

llmhub_diagnose_start() { # RANK...
    local line
    llmhub_say "DIAG: host $LLMHUB_HEAD_NODE, job $SLURM_JOB_ID, nodes $SLURM_JOB_NODELIST"
    llmhub_say "DIAG: directory $LLMHUB_ATTEMPT_DIR on $(stat -f -c %T -- "$LLMHUB_ATTEMPT_DIR")"
    llmhub_say "DIAG: ranks seen: ${*:-none}"
    llmhub_say "DIAG: interfaces $(ip -4 -o addr show | awk '{printf "%s%s %s", comma, $2, $4; comma = ", "}')"
    while read -r line; do
        llmhub_say "DIAG: srun: $line"
    done < <(tail -n 20 -- "$LLMHUB_ATTEMPT_DIR/step.log")
}

# Sets REPLY to the first of the ranks that are not among those seen. The step gives a node's
# rank by its place in the list.
llmhub_missing() { # RANK...
    local seen=" $* " rank count=0
    local -a nodes=() missing=()
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    for ((rank = 0; rank < PLAN_NNODES; rank++)); do
        case $seen in *" $rank "*) continue ;; esac
        count=$((count + 1))
        [ "$count" -gt 8 ] || missing+=("rank $rank on ${nodes[rank]-an unknown node}")
    done
    printf -v REPLY '%s, ' "${missing[@]}"
    REPLY=${REPLY%, }
    [ "$count" -le 8 ] || REPLY+=" and $((count - 8)) more"
}

llmhub_await_ranks() {
    local marker node
    local -A up=()
    while [ "${#up[@]}" -lt "$PLAN_NNODES" ]; do
        if ! llmhub_listen 0.2 || [ "$LLMHUB_RANK_FAILED" -eq 1 ]; then
            llmhub_judge "srun step exited before all ranks started"
        fi
        if [ "$SECONDS" -ge "$PLAN_RANK_START_TIMEOUT" ]; then
            llmhub_diagnose_start "${!up[@]}"
            llmhub_missing "${!up[@]}"
            llmhub_fail "only ${#up[@]} of $PLAN_NNODES ranks started within ${PLAN_RANK_START_TIMEOUT}s, without $REPLY: Slurm could not place a rank, or the log directory is not on shared storage (see the LLMHUB-DIAG lines in the .out)"
        fi
        for marker in "$LLMHUB_ATTEMPT_DIR"/started/*[0-9]; do
            if [ -z "${up[${marker##*/}]-}" ] && [ -e "$marker" ]; then
                read -r node <"$marker"
                up[${marker##*/}]=$node
                llmhub_say "STAGE-A: rank ${marker##*/} up on $node"
                llmhub_mark "rank ${marker##*/} up on $node"
            fi
        done
    done
    llmhub_say "STAGE-A: all $PLAN_NNODES ranks launched"
    printf 'go\n' >&"$LLMHUB_STEP_STDIN"
}

# Prints the HTTP status of one request to rank 0, which is on this node, and with "body"
# for WANTED the body too; nothing if there was no answer. Over bash, so that a key is on
# no command line.
llmhub_http() { # SECONDS WANTED METHOD PATH [JSON]
    local body=${5-} code key='' header i
    for i in "${!PLAN_ENV_NAMES[@]}"; do
        if [ "${PLAN_ENV_NAMES[i]}" = VLLM_API_KEY ]; then
            llmhub_expand "${PLAN_ENV_VALUES[i]}"
            key=$REPLY
        fi
    done
    (
        trap '' PIPE
        exec {connection}<>"/dev/tcp/127.0.0.1/$server_port_number" || exit
        printf '%s %s HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n%sContent-Length: %s\r\n\r\n%s' \
            "$3" "$4" "${key:+Authorization: Bearer $key$'\r\n'}" "${#body}" "$body" >&"$connection"
        read -r -t "$1" -u "$connection" _ code _ || exit
        printf '%s\n' "$code"
        [ "$2" = body ] || exit
        while read -r -t "$1" -u "$connection" header && [ "$header" != $'\r' ]; do :; done
        timeout "$1" cat <&"$connection"
    ) 2>/dev/null
}

# True when the server has answered a real request.
llmhub_answers() {
    local code
    [ "$(llmhub_http 5 status GET /health)" = 200 ] || return 1
    case $PLAN_READY_PROBE/$PLAN_MODEL_TYPE in
        completion/LLM | completion/VLM) ;;
        *) return 0 ;;
    esac
    code=$(llmhub_ask_for_token 120)
    case $code in
        2??) return 0 ;;
        4??) llmhub_say "WARN: the server answers the readiness request with HTTP $code; it is alive" ;;
        *) return 1 ;;
    esac
}

# Prints the HTTP status of a completion of one token.
llmhub_ask_for_token() { # SECONDS
    llmhub_http "$1" status POST /v1/completions \
        "$(jq -nc --arg model "$PLAN_MODEL_NAME" '{model: $model, prompt: "a", max_tokens: 1}')"
}

# Sets REPLY to the HTTP status of a request for one token, to nothing if there was no
# answer; false if a rank or the step has ended meanwhile, which is then what to tell.
llmhub_probe() { # SECONDS
    local answer ended=0
    exec {answer}< <(llmhub_ask_for_token "$1")
    until read -r -t 0 -u "$answer" || [ "$ended" -eq 1 ]; do
        llmhub_listen 0.2 && [ "$LLMHUB_RANK_FAILED" -eq 0 ] || ended=1
    done
    REPLY=
    if [ "$ended" -eq 0 ] && ! read -r -u "$answer"; then
        # a server that has ended may be heard of a little later
        llmhub_listen_until 1
        llmhub_listen 0.1 && [ "$LLMHUB_RANK_FAILED" -eq 0 ] || ended=1
    fi
    exec {answer}<&-
    [ "$ended" -eq 0 ]
}

llmhub_await_server_check() {
    if ! llmhub_listen 0.2 || [ "$LLMHUB_RANK_FAILED" -eq 1 ]; then
        llmhub_judge "the step ended before the server was ready"
    fi
    if [ "$PLAN_SERVER_TIMEOUT" -gt 0 ] && [ "$SECONDS" -ge "$LLMHUB_BUDGET" ]; then
        llmhub_fail "server not ready within ${LLMHUB_BUDGET}s; raise LLMHUB_MN_SERVER_TIMEOUT if the model loads that long (ranks/ in the job directory shows how far it got)"
    fi
}

llmhub_await_server() {
    local probe
    while :; do
        llmhub_answers &
        probe=$!
        while kill -0 "$probe" 2>/dev/null; do
            llmhub_await_server_check
        done
        wait "$probe" && break
        llmhub_listen_until 1
        llmhub_await_server_check
    done
    LLMHUB_READY=1
    llmhub_say "READY: $server_address answered after ${SECONDS}s"
    llmhub_mark ready
    # what vec-inf looks for, whatever this vLLM prints and where
    printf '%s\n' "$PLAN_READY_SIGNATURE" >&4
}

# Prints the verdict of the first known failure, in their order, that the logs show. One
# pass over the logs, which may be huge: most lines match nothing.
llmhub_cause() { # LOG...
    local i lines any=()
    for i in "${!LLMHUB_FAILURE_PATTERNS[@]}"; do
        any+=(-e "${LLMHUB_FAILURE_PATTERNS[i]}")
    done
    # bytes: a log need not be text
    lines=$(LC_ALL=C grep -a -h -s -E "${any[@]}" -- "$@" | tail -n 5000)
    [ -n "$lines" ] || return 1
    for i in "${!LLMHUB_FAILURE_PATTERNS[@]}"; do
        if LC_ALL=C grep -a -q -E -e "${LLMHUB_FAILURE_PATTERNS[i]}" <<<"$lines"; then
            printf '%s\n' "${LLMHUB_FAILURE_VERDICTS[i]}"
            return 0
        fi
    done
    return 1
}

# Prints "RANK NODE STATUS SECONDS" of the first rank to end by itself and of those that
# ended within a second of it.
llmhub_first_ends() {
    grep -o 'LLMHUB-END .*' -- "$LLMHUB_ATTEMPT_DIR/step.log" |
        sed -E 's/.* rank=([0-9]+) node=(\S+) status=([0-9]+) seconds=([0-9]+) at=([0-9.]+) stopping=([01])/\5 \6 \1 \2 \3 \4/' |
        sort -n |
        awk '!first && !$2 { first = $1 } first && $1 - first <= 1 { print $3, $4, $5, $6 }'
}

# Something has failed: name the first rank to end, or, of those that
# ended within a second of it, the first whose log tells why.
llmhub_judge() { # FALLBACK
    local fields rank='' node='' status='' seconds='' cause='' log='' message first='' signal=''
    local step_log=$LLMHUB_ATTEMPT_DIR/step.log line
    # others may be ending of the same cause; and the signal that ended the step may be on
    # its way to this process too
    llmhub_listen_until 1
    llmhub_nap 0.3
    if line=$(grep -m 1 -o 'LLMHUB-REFUSED .*' -- "$step_log"); then
        read -r _ rank node message <<<"$line"
        node=${node#node=}
        llmhub_fail "$message" "${rank#rank=}" "${node%:}" 1 '' "$SECONDS"
        return
    fi
    while read -r fields; do
        read -r rank node status seconds <<<"$fields"
        log=$LLMHUB_JOB_DIR/ranks/rank-$rank.$node
        [ -n "$first" ] || first=$fields
        cause=$(llmhub_cause "$log.err" "$log.out") && first=$fields && break
    done < <(llmhub_first_ends)
    if [ -n "$first" ]; then
        read -r rank node status seconds <<<"$first"
        log=$LLMHUB_JOB_DIR/ranks/rank-$rank.$node.err
        message="rank $rank on $node exited with status $status after ${seconds}s"
        [ "$LLMHUB_READY" -eq 0 ] || message+=", while serving"
        # a shell gives 128 + the signal, of which Linux has 64
        [ "$status" -le 128 ] || [ "$status" -gt 192 ] || signal=$((status - 128))
        llmhub_fail "$message${cause:+: $cause}" "$rank" "$node" "$status" \
            "$signal" "$seconds" "$cause" "$log"
        return
    fi
    # every rank was told to stop: the word to this script may be late on a big cluster
    case $(squeue -h -j "$SLURM_JOB_ID" -o %T) in
        COMPLETING | CANCELLED | TIMEOUT | PREEMPTED | PENDING) llmhub_stop ;;
    esac
    # a rank script that was itself killed says nothing, one that was told to stop though
    # the job is not stopping does not count as the first: srun names it
    message=$1
    line=$(grep -m 1 -E '^srun: error: [^ ]+: task [0-9]+: ' -- "$step_log")
    if [[ $line =~ ^srun:\ error:\ ([^ ]+):\ task\ ([0-9]+):\ (.*) ]]; then
        node=${BASH_REMATCH[1]} rank=${BASH_REMATCH[2]}
        message+=": rank $rank on $node: ${BASH_REMATCH[3]}"
    fi
    # a node that did not take its task: srun then kills the others, which it names too
    line=$(grep -m 1 -E '^srun: error: Task launch for [^ ]+ failed on node ' -- "$step_log")
    if [[ $line =~ failed\ on\ node\ ([^:]+):\ (.*) ]]; then
        node=${BASH_REMATCH[1]} rank=
        message="$1: Slurm could not start the task on $node: ${BASH_REMATCH[2]}"
    fi
    llmhub_fail "$message" "$rank" "$node" '' '' "$SECONDS" '' "$step_log"
}

# Prints the number of connections to the server. uvicorn closes an idle one after 5 s, so
# one that stays is a request; vLLM's own gauge stands still when its engine does.
llmhub_connections() {
    ss -Htan | awk -v port=":$server_port_number" '
        $1 == "ESTAB" && substr($4, length($4) - length(port) + 1) == port { count++ }
        END { print count + 0 }'
}

# Prints the number of requests that run or wait, and then every counter that moves when
# a token, prompt or generated, has come; nothing if the server does not answer. The share
# of the KV cache moves with each chunk of a long prompt.
llmhub_progress() {
    llmhub_http 10 body GET /metrics | awk '
        /^vllm:num_requests_(running|waiting)[{ ]/ { requests += $NF; found = 1 }
        /^vllm:(prompt_tokens|generation_tokens|request_success)_total[{ ]/ ||
            /^vllm:iteration_tokens_total_(sum|count)[{ ]/ ||
            /^vllm:(kv|gpu)_cache_usage_perc[{ ]/ { moving = moving " " $NF }
        END { if (found) print requests + 0, moving }'
}

# Ends the step when requests are running and no token has come for PLAN_STALL_TIMEOUT:
# a hung rank or a cut link, which neither Slurm nor /health sees. Latency is not looked
# at: a cut of 85 s was seen to heal.
llmhub_check_progress() {
    local requests moving connections
    connections=$(llmhub_connections)
    read -r requests moving < <(llmhub_progress)
    if [ -z "$LLMHUB_MOVING$requests" ]; then
        # nothing to watch, with --disable-log-stats for instance
        LLMHUB_ALIVE_AT=$SECONDS
    fi
    if [ -n "$requests" ] && { [ "$moving" != "$LLMHUB_MOVING" ] || [ $((requests + connections)) -eq 0 ]; }; then
        # an idle server does not stall, but its idle time goes on
        [ "$moving" = "$LLMHUB_MOVING" ] || LLMHUB_MOVED_AT=$SECONDS
        LLMHUB_MOVING=$moving
        LLMHUB_ALIVE_AT=$SECONDS
    fi
    if [ "$PLAN_STALL_TIMEOUT" -gt 0 ] && [ $((SECONDS - LLMHUB_ALIVE_AT)) -ge "$PLAN_STALL_TIMEOUT" ]; then
        if [ "${requests:-0}" -eq 0 ]; then
            # a connection need not hold a request: uvicorn keeps one that never sent any
            llmhub_probe "$PLAN_STALL_TIMEOUT" || return 0
            [ -z "$REPLY" ] || { LLMHUB_ALIVE_AT=$SECONDS && return 0; }
            requests=1
        fi
        llmhub_fail "no token for $((SECONDS - LLMHUB_ALIVE_AT))s with $((requests > connections ? requests : connections)) request(s) waiting: a rank hangs or the fabric is cut" '' '' '' '' "$SECONDS" "stalled"
        return 1
    fi
    if [ "$PLAN_IDLE_PROBE" -gt 0 ] && [ $((SECONDS - LLMHUB_MOVED_AT)) -ge "$PLAN_IDLE_PROBE" ]; then
        llmhub_probe "$PLAN_IDLE_PROBE" || return 0
        # once is a passing error
        case $REPLY in 5??) llmhub_probe "$PLAN_IDLE_PROBE" || return 0 ;; esac
        LLMHUB_MOVED_AT=$SECONDS
        case $REPLY in
            [24]??) ;;
            '')
                llmhub_fail "the idle server did not answer a request for one token within ${PLAN_IDLE_PROBE}s" '' '' '' '' "$SECONDS" "stalled"
                return 1
                ;;
            *)
                llmhub_fail "the idle server answers a request for one token with HTTP $REPLY" '' '' '' '' "$SECONDS"
                return 1
                ;;
        esac
    fi
}

# Returns when the step has to be started again; anything else ends the job.
llmhub_watch() {
    local interval=3600 knob check
    for knob in "$PLAN_STALL_TIMEOUT" "$PLAN_IDLE_PROBE"; do
        if [ "$knob" -gt 0 ] && [ $((knob / 10 + 1)) -lt "$interval" ]; then
            interval=$((knob / 10 + 1))
        fi
    done
    LLMHUB_MOVING=
    LLMHUB_MOVED_AT=$SECONDS
    LLMHUB_ALIVE_AT=$SECONDS
    check=$((SECONDS + interval))
    while llmhub_listen $((check > SECONDS ? check - SECONDS : 1)) && [ "$LLMHUB_RANK_FAILED" -eq 0 ]; do
        [ "$SECONDS" -ge "$check" ] || continue
        check=$((SECONDS + interval))
        [ "$interval" -eq 3600 ] || llmhub_check_progress || return 0
    done
    llmhub_judge "the step ended"
}

# Everything after vec-inf's own setup, which has set server_port_number and
# server_address.
llmhub_serve() {
    set -u
    [ -n "$server_port_number" ] || llmhub_fail "no free API port on $LLMHUB_HEAD_NODE"
    llmhub_publish_address
    while :; do
        llmhub_find_port
        llmhub_readiness_budget
        llmhub_say_topology
        llmhub_start_step
        llmhub_await_ranks
        llmhub_await_server
        llmhub_watch
        # a restart: same allocation, API port and address, and nothing else of the old
        LLMHUB_READY=0
        LLMHUB_RANK_FAILED=0
        llmhub_make_attempt
    done
}
