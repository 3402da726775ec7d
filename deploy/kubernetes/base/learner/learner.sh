# The learner's pod runs this. It resumes a run that has begun, and waits idly once the run is over: a pod that ended
# would be started again, and the run's files can be copied from one that waits.
set -euo pipefail

stopping=""
child=""
stop() {
    stopping=yes
    if [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null || true
    fi
}
trap stop TERM

# Run a command to its end and set `code`. A SIGTERM reaches the command whenever it comes.
run() {
    code=0
    "$@" &
    child=$!
    if [ -n "$stopping" ]; then
        stop
    fi
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal has ended `wait`
        code=0
        wait "$child" || code=$?
    done
}

until headway broker --url "$HEADWAY_BROKER"; do
    run sleep 2
    if [ -n "$stopping" ]; then
        exit 0
    fi
done

resume=()
if [ -e "runs/$HEADWAY_RUN/incarnation" ]; then # a learner of this run has begun
    resume=(--resume)
fi
run headway learner /etc/headway/recipe/recipe.yaml "${resume[@]}"
if [ "$code" -ne 0 ] || [ -n "$stopping" ]; then
    exit "$code"
fi
echo "The run is over. Copy what you need from /work/runs/$HEADWAY_RUN, then delete what was launched."
run sleep infinity
exit 0
