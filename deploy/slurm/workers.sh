await_address
run "$PYTHON" -m headway workers --count 1 --pool "$POOL-$SLURM_ARRAY_TASK_ID" "${ARGUMENTS[@]}"
