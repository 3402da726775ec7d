# The learner's job has ended for good. Workers that wait in the queue leave it, and those that run drain, before the
# broker does.
read -r -a jobs < "$DIRECTORY/jobs.txt"
broker="${jobs[0]}" workers=("${jobs[@]:2}")
if [ "${#workers[@]}" -gt 0 ]; then
    scancel --state=PENDING "${workers[@]}" || true
    scancel --batch --signal=TERM "${workers[@]}" || true
    for ((waited = 0; waited < GRACE_S; waited++)); do
        if [ -z "$(squeue --noheader --jobs="$(IFS=,; echo "${workers[*]}")" 2>/dev/null)" ]; then
            break
        fi
        sleep 1
    done
fi
scancel --batch --signal=TERM "$broker" || true
