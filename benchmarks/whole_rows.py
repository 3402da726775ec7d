"""An update over full rows under settings that change what is done besides its products of matrices, one after another.

    python -m benchmarks.whole_rows [--shape qwen3-1.7b] [--whole 8192] [--tokens 65536] [--budget 16384]
        [--of before,large-kept,large] [--profile] [--repeats 3] [--limit-s 280] [--device cuda|cpu]

Each setting is a process of `benchmarks.prefix_trees --compile`: `before` as Headway does it by default, `large-kept`
and `large` with rows of twice the budget, whose logits are kept for the backward pass or computed again in it. The last
line is one JSON object: for each setting seconds of an update, MFU, the gradients' norm, and where the time goes; a
setting that did not end says why.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

SETTINGS = {
    "before": (1, []),
    "large-kept": (2, ["--kept-logits", "6"]),
    "large": (2, ["--kept-logits", "3"]),
}
"""Each setting's number of budgets in a row, and its options; the most important first."""

LEAST_S = 25.0
"""No setting starts with less time left."""


def measured(options: argparse.Namespace, setting: str, left_s: float) -> dict[str, Any]:
    """Return the figures of one setting, or why there are none."""
    budgets, more = SETTINGS[setting]
    command = ["--shape", options.shape, "--layers", str(options.layers), "--device", options.device]
    command += ["--whole", str(options.whole), "--tokens", str(options.tokens), "--whole-only", "--settings", "never"]
    command += ["--budget", str(budgets * options.budget), "--repeats", str(options.repeats), "--warm-ups", "1"]
    command += ["--cuda-graphs", "never", *more]
    command += ["--compile"] * (options.device == "cuda") + ["--profile"] * options.profile
    if options.models:
        command += ["--models", options.models]
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks.prefix_trees", *command],
            capture_output=True,
            text=True,
            timeout=left_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end within {left_s:.0f} s"}
    if ran.returncode:
        return {"error": ran.stderr[-600:]}
    (case,) = json.loads(ran.stdout.splitlines()[-1])["cases"]
    return {"error": case["error"]} if "error" in case else dict(case["never"])


def main() -> None:
    """Measure the settings that the command line names, in the order of `SETTINGS`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, default=0, help="default: as many as the shape has")
    parser.add_argument("--whole", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--of", default=",".join(SETTINGS), metavar="NAME,...")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--limit-s", type=float, default=280.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--models", default="", help="the folder of models; as in benchmarks.prefix_trees")
    options = parser.parse_args()
    if unknown := set(options.of.split(",")) - SETTINGS.keys():
        parser.error(f"--of: {', '.join(sorted(unknown))} is none of {', '.join(SETTINGS)}")
    ends, found = time.monotonic() + options.limit_s, dict[str, Any]()
    for setting in (name for name in SETTINGS if name in options.of.split(",")):
        left_s = ends - time.monotonic()
        found[setting] = measured(options, setting, left_s) if left_s > LEAST_S else {"error": "no time was left"}
        print(json.dumps({setting: found[setting]}), file=sys.stderr, flush=True)
    print(json.dumps({"options": vars(options), "settings": found}))
    if any("error" in figures for figures in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
