await_address
run "$PYTHON" -m deploy workers --count 1 --pool "$POOL-$SLURM_ARRAY_TASK_ID" "${ARGUMENTS[@]}"
