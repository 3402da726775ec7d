await_address
run "$PYTHON" -m headway scorers --count 1 --scorer "$SCORER" "${ARGUMENTS[@]}"
