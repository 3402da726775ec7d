await_address
run "$PYTHON" -m deploy scorers --count 1 --scorer "$SCORER" "${ARGUMENTS[@]}"
