#!/usr/bin/env bash
# Entry point of a pod of the Job (docs/kubernetes.md): one recover-run, which launches the run with the other pods, or
# joins the run if it is running already and this pod replaces a lost one.
#
#   pod.sh [OPTIONS OF recover-run] SCRIPT [ITS ARGUMENTS]
#
# Environment: JOB_COMPLETION_INDEX (this pod's index), POD_IP, PODS, WORKERS (per pod), MASTER (the name of pod 0),
# RUN_DIR (on storage that all pods share), RECOVER_SECRET; JOB_UID (the uid of the Job; optional).
set -euo pipefail
: "${JOB_COMPLETION_INDEX:?}" "${POD_IP:?}" "${PODS:?}" "${WORKERS:?}" "${MASTER:?}" "${RUN_DIR:?}" "${RECOVER_SECRET:?}"
PORT=${PORT:-29500}
PATIENCE=${PATIENCE:-30} # seconds to wait for an answer of a run that has left files in the folder
export RECOVER_HOST=$POD_IP # the address at which the other pods reach this one

say() { printf 'pod %s: %s\n' "$JOB_COMPLETION_INDEX" "$*" >&2; }

# Print the command that joins the running run; nothing if none is running.  Each launcher logs it once all have joined,
# so without such a line there is no run; the last line belongs to the last launch.
how_to_join() {
    local answer coordinators second
    for ((second = 0; second < PATIENCE; second += 2)); do
        grep -qs 'recover-run --join ' "$RUN_DIR"/launcher-*.log || return 0
        answer=$(recover-status "$RUN_DIR" --check 2>/dev/null || true)
        case $answer in
            HEALTHY* | DEGRADED* | RECOVERING* | STALLED*)
                # All pods in that line may be lost; pods that joined later have left their addresses in the folder.
                coordinators=$(recover-status "$RUN_DIR" --coordinators) || return 0
                # A launcher that was left out logs the command, too, as of that time.
                # Not grep: it prints no line of a file with a NUL byte, which a host that crashed may leave.
                sed -n '/join from other hosts: recover-run --join /p' "$RUN_DIR"/launcher-*.log | tail -n 1 |
                    sed "s/.*: recover-run/recover-run/; s/--recover-coordinator [^ ]*/--recover-coordinator $coordinators/"
                return
                ;;
            ENDED*) return 0 ;;
            *) sleep 2 ;; # that run is over or in its first step, or this pod's network is not ready
        esac
    done
}

# Succeeds if this pod was replaced after its Job had finished the training: no other pod would join a launch.
finished() {
    local events last
    if [[ ! ${JOB_UID:-} || $PODS == 1 || $(cat "$mine" 2>/dev/null) != "$JOB_UID" ]]; then return 1; fi
    while read -r events; do
        last=$(sed -nE '/"event": ?"(listening|stop)"/p' "$events" | tail -n 1)
        if [[ $last == *'"stop"'* && $last =~ \"code\":\ ?0[,}] ]]; then return 0; fi
    done < <(find "$RUN_DIR" -maxdepth 1 -name 'events-*.jsonl' -newer "$mine")
    return 1
}

mkdir -p "$RUN_DIR"
said=$RUN_DIR/launcher-$JOB_COMPLETION_INDEX.log
mine=$RUN_DIR/job-$JOB_COMPLETION_INDEX # uid of the last pod's Job; as old as the first pod of that Job here
if finished; then
    if grep -qs 'but the script failed afterwards' "$said"; then
        say "the training is finished, but the script failed after it in this pod: see $RUN_DIR/worker-*.log"
        exit 1
    fi
    say 'the training is finished: nothing is left to do'
    exit 0
fi
if [[ ${JOB_UID:-} && $(cat "$mine" 2>/dev/null) != "$JOB_UID" ]]; then printf %s "$JOB_UID" >"$mine"; fi
read -ra join <<<"$(how_to_join)"
if ((${#join[@]})); then
    say 'the run is already running: this pod joins it'
    exec "${join[@]}" --nproc-per-node "$WORKERS" --log-dir "$RUN_DIR" "$@" > >(tee -a -- "$said") 2>&1
fi
rm -f -- "$said"
exec recover-run --nnodes "$PODS" --node-rank "$JOB_COMPLETION_INDEX" --master-addr "$MASTER" --master-port "$PORT" \
    --nproc-per-node "$WORKERS" --log-dir "$RUN_DIR" "$@" > >(tee -- "$said") 2>&1
