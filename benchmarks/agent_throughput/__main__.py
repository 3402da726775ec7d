"""What an agent's turn costs a worker, whether tools leave its engine idle, and its endpoint beside `vllm serve`.

    python -m benchmarks.agent_throughput [--parts turns,tools,endpoint] [--model DIR] [--output FILE]
        [--engine simulated|vllm] [--device cpu|cuda] [--places 32] ...

    turns     CPU milliseconds of a turn by its parts, at the turns of `--turns`, with an engine that answers at once
    tools     tokens a second of an engine with `--places` requests at a time: of plain samples, of agents whose tools
              answer at once, and of agents whose tools take a lognormal time of at most 30 s; `ratio` is that of the
              last two
    endpoint  requests a second, CPU time of a request and latencies: of a worker's endpoint, with and without turns
              that are durable before they are told, and of `vllm serve` (needs a model with weights and vLLM)

Without `--model`, a tokenizer of bytes is written for the first two. A simulated engine takes `--step-s` for a token of
each request; `--clock` scales the tools' times. On a GPU, with all of SmolLM2-135M-Instruct:

    python -m benchmarks.agent_throughput --parts tools,endpoint --engine vllm --device cuda --places 256 \\
        --model /models/SmolLM2-135M-Instruct --processes 4 --output /tmp/agents.json

which takes about four minutes for `tools`, three for a worker's endpoint and two for `vllm serve`.

Each part runs in a process of its own and ends after `--part-s`; what others have found is kept in the output. The last
line is one JSON object.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.processes import isolated, last_words

from .parts import write, written_tokenizer

PARTS = ("turns", "tools", "endpoint")


def orders(options: argparse.Namespace) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return what each part measures: calls with their arguments, by name."""
    model = str(options.model or written_tokenizer())
    engine = {
        "kind": options.engine,
        "model": model,
        "places": options.places,
        "step_s": options.step_s,
        "device": options.device,
        "memory": options.memory,
        "options": json.loads(options.engine_options),
    }
    tools = {
        "engine": engine,
        "turns": options.tool_turns,
        "tool_median_s": options.tool_median_s,
        "clock": options.clock,
        "episodes_per_place": options.episodes_per_place,
        "processes": options.processes,
        "warm_s": options.warm_s,
        "seconds": options.seconds,
    }
    endpoint = {
        "engine": engine,
        "answers": options.answers,
        "parallel": options.parallel,
        "seconds": options.point_s,
    }
    every = {
        "turns": [("turns", {"model": model, "episodes": options.episodes, "turns": options.turns})],
        "tools": [("tools", tools)],
        "endpoint": [(server, {**endpoint, "server": server}) for server in ("headway", "vllm")],
    }
    return {part: every[part] for part in options.parts}


def main() -> int:
    """Return the exit code: 1 if a part failed."""
    options = _parse()
    command.end_children_at_sigterm()
    found: dict[str, Any] = {}
    for part, calls in orders(options).items():
        for name, order in calls:
            command.tell(f"{part}: {name} begins")
            outcome = isolated(f"benchmarks.agent_throughput.{part}:measure", order, 1, options.part_s)
            if "error" in outcome:
                command.tell(outcome["error"])
            found[name] = outcome.get("result", {"error": last_words(outcome)})
            write(options.output, found)
    return command.finish(found, any("error" in one for one in found.values()))


def _parse() -> argparse.Namespace:
    parser = command.parser(__doc__, "agent_throughput")
    parser.add_argument("--parts", type=command.names, default=["turns", "tools"])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--part-s", type=float, default=290.0)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--turns", type=command.numbers, default=[1, 8, 64])
    parser.add_argument("--engine", default="simulated")
    parser.add_argument("--engine-options", default="{}", help="JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", type=float, default=0.6, help="share of a GPU's memory that vLLM takes")
    parser.add_argument("--places", type=int, default=32)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--tool-turns", type=int, default=8)
    parser.add_argument("--tool-median-s", type=float, default=2.0)
    parser.add_argument("--clock", type=float, default=1.0)
    parser.add_argument("--episodes-per-place", type=int, default=24)
    parser.add_argument("--processes", type=int, default=1, help="processes that run agents")
    parser.add_argument("--warm-s", type=float, default=40.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--answers", type=command.numbers, default=[1, 16, 128])
    parser.add_argument("--parallel", type=command.numbers, default=[1, 64, 256])
    parser.add_argument("--point-s", type=float, default=4.0)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
