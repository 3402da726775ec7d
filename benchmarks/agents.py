"""python -m benchmarks.agents RECIPE --output DIR [--timeout-s S] [A.B=C ...]

Trains a recipe's agent, and then does the same without learning: its rate is a thousandth. Both begin with one warm-up.
Prints success on held-out tasks before and after both, episodes and tokens per second of the steps after the first
ones, turns and forks of an episode, how many episodes span how many weight versions, and how many cores the processes
of each role took. With a model for GPUs:

    python -m benchmarks.agents gpu/agent-tools.yaml --output /tmp/agents model.path=/models/SmolLM2-135M-Instruct

Each part is in DIR/figures.json as soon as it has ended, and is not made again there: give another DIR for other
settings.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.run.stage_output import is_complete
from headway.learner.disk import replace_file
from headway.learner.experience.log import ExperienceLog

from . import command
from .peers.of_headway import read_figures
from .processes import headway, repeated

EXPERIENCE = "experience"
LOOK_S = 2.0
SUMMARY = ("eval_before", "eval_after", "reward_first", "reward_last", "trained_trajectories", "trained_twice")
STEADY = ("samples_per_s", "tokens_per_s", "lag_mean", "learner_idle")


class Cores:
    """Looks at the processes that this one has started, and tells how many cores those of each role took."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[float, float]] = {}
        self._last: dict[str, tuple[float, float]] = {}

    def look(self) -> None:
        """Note the processor time of every process so far."""
        now = time.monotonic()
        for process in psutil.Process().children(recursive=True):
            try:
                used = process.cpu_times()
                name = f"{role_of(process.cmdline())}:{process.pid}"
            except psutil.Error:  # it has ended
                continue
            self._last[name] = (now, used.user + used.system)
            self._first.setdefault(name, self._last[name])

    def of_roles(self) -> dict[str, float]:
        """Return the mean number of cores by role, of all its processes together, from their first look to the last."""
        began = min((at for at, _ in self._first.values()), default=0.0)
        seconds = max((at for at, _ in self._last.values()), default=0.0) - began
        roles: dict[str, float] = {}
        for name, (_, used) in self._last.items():
            role = name.partition(":")[0]
            roles[role] = roles.get(role, 0.0) + used - self._first[name][1]
        return {role: round(used / max(seconds, LOOK_S), 2) for role, used in sorted(roles.items())}


def role_of(words: list[str]) -> str:
    """Return the role of a process: the command of `headway`, or its program."""
    if "headway" in words:
        return next((word for word in words[words.index("headway") + 1 :] if not word.startswith("-")), "headway")
    if any("user_code" in word for word in words):
        return "hosts of user code"
    if any("vllm" in word.lower() for word in words[:3]):
        return "vllm"
    return Path(words[0]).name if words else "ended"


def warmed_up(recipe: str, overrides: list[str], output: Path, timeout_s: float) -> list[str]:
    """Warm the recipe's model up, unless that is done, and return the overrides of runs that begin with it."""
    if not load_recipe(recipe, tuple(overrides)).warm_up:
        return []
    model = output / "warmed-up"
    if not is_complete(model):
        command.tell("warm-up: begins")
        place = (f"run.directory={output}", "run.name=warm-up", "evaluation.prompts=0")
        headway(["sft", recipe, "--output", str(model), *overrides, *place], timeout_s)
    return [f"model.path={model}", "model.random=null", "stages=[{kind: rl}]"]


def trained(recipe: str, overrides: list[str], directory: Path, name: str, timeout_s: float) -> dict[str, Any]:
    """Run the recipe, and return what its summary and its experience say."""
    began, cores = time.time(), Cores()
    command.tell(f"{name}: begins")
    where = [f"run.directory={directory}", f"run.name={name}"]
    with repeated(cores.look, LOOK_S):
        headway(["run", recipe, "--overwrite", *overrides, *where], timeout_s)
    run, took_s = directory / name, time.time() - began
    summary = json.loads((run / "summary.json").read_text())
    steady = msgspec.to_builtins(read_figures(run, began))
    return {
        **{key: summary[key] for key in (*SUMMARY, "max_lag_seen", "generation_tokens_per_s")},
        **{key: steady[key] for key in STEADY},
        **episodes(run),
        "cores": cores.of_roles(),
        "seconds": round(took_s, 1),
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
    command.end_children_at_sigterm()
    parser = command.parser(__doc__, "agents")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="A.B=C")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of one command")
    options = parser.parse_intermixed_args()
    output = options.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    rate = load_recipe(options.recipe, tuple(options.overrides)).optimizer.learning_rate
    warm = warmed_up(options.recipe, options.overrides, output, options.timeout_s)
    file = output / "figures.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"recipe": options.recipe}
    for name, own in (("learning", []), ("control", [f"optimizer.learning_rate={rate / 1000}"])):
        if name not in found:
            found[name] = trained(options.recipe, [*options.overrides, *warm, *own], output, name, options.timeout_s)
            replace_file(file, json.dumps(found).encode())
            command.tell(json.dumps({name: found[name]}))
    return command.finish(found)


if __name__ == "__main__":
    sys.exit(main())
