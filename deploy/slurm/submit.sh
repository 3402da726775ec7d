set -euo pipefail
cd "$DIRECTORY"
mkdir -p logs
rm -f address jobs.txt

submit() {
    local id
    id="$(sbatch --parsable "$@")"
    echo "${id%%;*}"
}

broker="$(submit broker.sh)"
learner="$(submit --dependency="after:$broker" learner.sh)"
jobs=("$broker" "$learner")
for script in "${WORKER_SCRIPTS[@]}"; do
    jobs+=("$(submit --dependency="after:$broker" "$script")")
done
echo "${jobs[*]}" > jobs.txt
stop="$(submit --dependency="afterany:$learner" stop.sh)"
echo "Submitted broker $broker, learner $learner, workers ${jobs[*]:2}, and $stop, which stops them after the learner."
