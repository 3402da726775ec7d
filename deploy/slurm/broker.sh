host="${HEADWAY_BROKER_HOST:-$(hostname -I | cut -d ' ' -f 1)}" # where the other jobs reach this node
if [ "$PORT" -eq 0 ]; then
    PORT="$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')"
fi

before=""
if [ -s "$DIRECTORY/address" ]; then
    before="$(cat "$DIRECTORY/address")"
fi
printf '%s\n' "$host:$PORT" > "$DIRECTORY/.address.partial"
mv "$DIRECTORY/.address.partial" "$DIRECTORY/address"

# The broker was queued again and got another node: the others drain and start again, with the new address.
if [ -n "$before" ] && [ "$before" != "$host:$PORT" ] && [ -s "$DIRECTORY/jobs.txt" ]; then
    read -r -a jobs < "$DIRECTORY/jobs.txt"
    scancel --batch --signal=USR1 "${jobs[@]:1}" || true
fi

run "$PYTHON" -m headway broker --directory "$SERVER_DIRECTORY" --host "$host" --port "$PORT"
