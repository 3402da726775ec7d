"""python -m benchmarks.agents RECIPE --output DIR [A.B=C ...]

Trains a recipe's agent, and then does the same without learning: its rate is a thousandth. Prints success on held-out
tasks before and after both, turns and forks of an episode, and how many episodes span how many weight versions. With a
model for GPUs:

    python -m benchmarks.agents gpu/agent-tools.yaml --output /tmp/agents model.path=/models/SmolLM2-135M-Instruct
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.deploy.recipe.resolve import load_recipe
from headway.learner.experience.log import ExperienceLog

from . import command
from .processes import headway

TIMEOUT_S = 3600.0
EXPERIENCE = "experience"


def trained(recipe: str, overrides: list[str], directory: Path, name: str, control: list[str]) -> dict[str, Any]:
    """Run the recipe, and return what its summary and its experience say."""
    began = time.monotonic()
    command.tell(f"{name}: begins")
    where = [f"run.directory={directory}", f"run.name={name}"]
    headway(["run", recipe, "--overwrite", *overrides, *control, *where], TIMEOUT_S)
    summary = json.loads((directory / name / "summary.json").read_text())
    kept = ("eval_before", "eval_after", "reward_first", "reward_last", "trained_trajectories", "trained_twice")
    return {
        **{key: summary[key] for key in (*kept, "max_lag_seen", "generation_tokens_per_s")},
        **episodes(directory / name),
        "seconds": round(time.monotonic() - began, 1),
    }


def episodes(run: Path) -> dict[str, Any]:
    """Return the means of an episode's turns and forks, and episodes by the number of versions that they span."""
    versions, turns, forks, count = Counter[int](), 0, 0.0, 0
    for trajectory in trajectories(run):
        count += 1
        versions[len({span.version for span in trajectory.spans})] += 1
        turns += len(trajectory.turns)
        forks += trajectory.rewards.get("agent/forks", 0.0)
    return {
        "episodes_by_versions": dict(sorted(versions.items())),
        "turns_mean": turns / max(count, 1),
        "forks_mean": forks / max(count, 1),
    }


def trajectories(run: Path) -> Iterator[Any]:
    """Yield all that the learner took."""
    log = ExperienceLog(run / EXPERIENCE)
    for step in log.steps:
        for group in log.read(step) or ():
            yield from group.trajectories


def main() -> int:
    """Return the exit code."""
    parser = command.parser(__doc__, "agents")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="A.B=C")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_intermixed_args()
    rate = load_recipe(options.recipe, tuple(options.overrides)).optimizer.learning_rate
    slow = [f"optimizer.learning_rate={rate / 1000}"]
    made = {
        name: trained(options.recipe, options.overrides, options.output, name, control)
        for name, control in (("learning", []), ("control", slow))
    }
    return command.finish({"recipe": options.recipe, **made})


if __name__ == "__main__":
    sys.exit(main())
