"""python -m benchmarks.agent_throughput"""

import json
import sys
from pathlib import Path

from benchmarks import command

from .parts import written_tokenizer
from .turns import measure


def main() -> int:
    parser = command.parser(__doc__, "agent_throughput")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--turns", type=command.numbers, default=[1, 8, 64])
    options = parser.parse_args()
    print(json.dumps(measure(options.model or written_tokenizer(), options.episodes, options.turns), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
