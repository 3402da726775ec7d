MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# Each rank is a task of its own, so that a drain reaches all ranks and no process between cuts it short.
# shellcheck disable=SC2016 # each task expands them
ranks=(srun --ntasks="$RANKS" --cpus-per-task="$THREADS" --kill-on-bad-exit=1 --unbuffered bash -c
    'export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"; exec "$@"' rank)

await_address
until "$PYTHON" -m headway broker --url "$HEADWAY_BROKER"; do
    leave_if_stopped
    sleep 2
    await_address # a broker that was queued again may be elsewhere
done

if [ ! -e "$RUN_DIRECTORY/config.yaml" ]; then
    run "$PYTHON" -m headway prepare "$RECIPE"
fi

has_steps=yes
for stage in "${STAGES[@]}"; do
    number="${stage%% *}" output="${stage#* }"
    if [ ! -e "$output/sft.json" ] && [ ! -e "$output/stage.json" ]; then
        run "${ranks[@]}" "$PYTHON" -m headway sft "$RECIPE" --output "$output" --stage "$number"
    fi
done

resume=()
if [ -e "$RUN_DIRECTORY/incarnation" ]; then # a learner of this run has begun
    resume=(--resume)
fi
run "${ranks[@]}" "$PYTHON" -m headway learner "$RECIPE" "${resume[@]}"
