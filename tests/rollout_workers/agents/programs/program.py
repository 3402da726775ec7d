"""A program that plays an episode as its first argument says; it knows nothing of Headway."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

task = json.loads(Path(os.environ["HEADWAY_TASK"]).read_text())
match sys.argv[1]:
    case "reward":
        assert os.listdir() == []
        Path("made").write_text("here")
        print("working")
        print(json.dumps({"reward": 0.5, "seed": task["seed"], "text": task["text"]}))
    case "environment":
        print(json.dumps({**os.environ, "here": os.getcwd()}))
        Path(sys.argv[2]).write_text(json.dumps({**os.environ, "here": os.getcwd()}))
    case "number":
        print(7)
    case "text":
        print("The answer is 7.")
    case "not finite":
        print('{"reward": "much"}')
    case "fails":
        print("no luck", file=sys.stderr)
        sys.exit(3)
    case "noise":
        for _ in range(300):
            sys.stdout.write("x" * 65536)
            sys.stderr.write("y" * 65536)
        print()
        print('{"reward": 1.0}')
    case "escapes":
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        Path(sys.argv[2]).write_text(str(subprocess.Popen(sleep, start_new_session=True).pid))
        print('{"reward": 0.25}', flush=True)
    case "children":  # leaves one behind, which holds the output open
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(sys.argv[2]).write_text(f"{child.pid} {os.getcwd()}")
        if sys.argv[3] == "waits":
            time.sleep(600)
