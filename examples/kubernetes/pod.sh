#!/usr/bin/env bash
# What a pod of the Job runs (docs/kubernetes.md): one recover-run, which launches the run with the other pods, or, where
# the run goes on already and this pod comes in place of a lost one, joins it.
#
#   pod.sh [OPTIONS OF recover-run] SCRIPT [ITS ARGUMENTS]
#
# From the environment: JOB_COMPLETION_INDEX (this pod's place), POD_IP, PODS, WORKERS (of each pod), MASTER (the name of
# pod 0), RUN_DIR (on storage that all pods share), RECOVER_SECRET; JOB_UID (the uid of the Job; may be left out).
set -euo pipefail
: "${JOB_COMPLETION_INDEX:?}" "${POD_IP:?}" "${PODS:?}" "${WORKERS:?}" "${MASTER:?}" "${RUN_DIR:?}" "${RECOVER_SECRET:?}"
PORT=${PORT:-29500}
PATIENCE=${PATIENCE:-30} # seconds to ask for a run of which the folder tells, where nobody answers
export RECOVER_HOST=$POD_IP # the address at which the other pods reach this one

say() { printf 'pod %s: %s\n' "$JOB_COMPLETION_INDEX" "$*" >&2; }

# How to join the run that goes on; nothing where none does.  Each launcher says it once all have come, so where none has
# said it there is nothing to ask; the last one's is that of the last launch.
how_to_join() {
    local answer coordinators second
    for ((second = 0; second < PATIENCE; second += 2)); do
        grep -qs 'recover-run --join ' "$RUN_DIR"/launcher-*.log || return 0
        answer=$(recover-status "$RUN_DIR" --check 2>/dev/null || true)
        case $answer in
            HEALTHY* | DEGRADED* | RECOVERING* | STALLED*)
                # Of the pods that the line names none may be left; those that joined tell of themselves in the folder.
                coordinators=$(recover-status "$RUN_DIR" --coordinators) || return 0
                # A launcher that was left out says the command, too, as it was when it was left out.
                # Not grep, which shows no line of a file that has a NUL byte, as a host that crashed may leave one.
                sed -n '/join from other hosts: recover-run --join /p' "$RUN_DIR"/launcher-*.log | tail -n 1 |
                    sed "s/.*: recover-run/recover-run/; s/--recover-coordinator [^ ]*/--recover-coordinator $coordinators/"
                return
                ;;
            ENDED*) return 0 ;;
            *) sleep 2 ;; # that run is over or makes its first step, or this pod's network is not there yet
        esac
    done
}

# Succeeds where this pod was made again after its Job had finished the training: no other pod would come to a launch.
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
mine=$RUN_DIR/job-$JOB_COMPLETION_INDEX # names the Job of the last pod here; as old as the first pod of that Job here
if finished; then
    if grep -qs 'but the script failed afterwards' "$said"; then
        say "the training is finished, but the script has failed after it in this pod: $RUN_DIR/worker-*.log tell why"
        exit 1
    fi
    say 'the training is finished: nothing is left to do'
    exit 0
fi
if [[ ${JOB_UID:-} && $(cat "$mine" 2>/dev/null) != "$JOB_UID" ]]; then printf %s "$JOB_UID" >"$mine"; fi
read -ra join <<<"$(how_to_join)"
if ((${#join[@]})); then
    say 'the run goes on: this pod joins it'
    exec "${join[@]}" --nproc-per-node "$WORKERS" --log-dir "$RUN_DIR" "$@" > >(tee -a -- "$said") 2>&1
fi
rm -f -- "$said"
exec recover-run --nnodes "$PODS" --node-rank "$JOB_COMPLETION_INDEX" --master-addr "$MASTER" --master-port "$PORT" \
    --nproc-per-node "$WORKERS" --log-dir "$RUN_DIR" "$@" > >(tee -- "$said") 2>&1
