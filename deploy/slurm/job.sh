# Slurm signals this script alone: USR1 comes GRACE_S before the time limit or a preemption (--signal), TERM with
# `scancel --batch --signal=TERM`. The command gets SIGTERM, so that it drains; after GRACE_S it is killed.
set -euo pipefail
cd "$WORK_DIRECTORY"

stopping="" # empty, `requeue` or `end`
child=""
has_steps="" # not empty where srun starts the command

stop() {
    stopping="${stopping:-$1}"
    if [ -n "$has_steps" ]; then
        scancel --signal=TERM "$SLURM_JOB_ID" || true # to srun itself, it would kill its tasks after Slurm's KillWait
    elif [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null || true
    fi
}
trap 'stop requeue' USR1
trap 'stop end' TERM

# Wait for the address that the broker's job writes, and set HEADWAY_BROKER to the URL of this role.
await_address() {
    until [ -s "$DIRECTORY/address" ]; do
        leave_if_stopped
        sleep 1
    done
    HEADWAY_BROKER="redis://$BROKER_USER@$(cat "$DIRECTORY/address")?password_file=$PASSWORD_FILE"
    export HEADWAY_BROKER
}

# Run a command to its end. The job ends if the command fails, or if the job is told to stop meanwhile.
run() {
    local code=0 deadline=""
    leave_if_stopped
    "$@" &
    child=$!
    if [ -n "$stopping" ]; then # the signal came before the child was known
        stop "$stopping"
    fi
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal has ended `wait`
        if [ -z "$deadline" ]; then
            (sleep "$GRACE_S" && kill -KILL "$child") >/dev/null 2>&1 &
            deadline=$!
        fi
        code=0
        wait "$child" || code=$?
    done
    if [ -n "$deadline" ]; then
        kill "$deadline" 2>/dev/null || true
    fi
    child=""
    leave_if_stopped
    if [ "$code" -ne 0 ]; then
        exit "$code"
    fi
}

leave_if_stopped() {
    if [ "$stopping" = requeue ]; then
        echo "Drained; the job goes back into the queue and goes on from here."
        scontrol requeue "$SLURM_JOB_ID"
    fi
    if [ -n "$stopping" ]; then
        exit 0
    fi
}
