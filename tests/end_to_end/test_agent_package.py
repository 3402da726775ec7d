"""A model of random weights learns through an agent's package as it is, in a process of its own for each episode.

`make test-agents` runs this, in an environment that has the package.
"""

import json
import stat
import sys
from pathlib import Path

import pytest

from benchmarks.agents import episodes
from headway.broker.installation import is_installed

from .records import check_trained, summary
from .terminals import Terminals

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # the package takes two seconds to start, and a busy machine many more
    pytest.mark.skipif(
        not is_installed("agents"), reason="openai-agents is in an environment of its own: make test-agents"
    ),
]

PROGRAM = Path(__file__).parents[1] / "rollout_workers" / "agents" / "programs" / "with_openai_agents.py"
CHAINS = "{min_operations: 1, max_operations: 2, largest: 99, modulus: 100}"
SHORT = (
    f"prompts.options={CHAINS}",
    *(f"stages.0.phases.{phase}.options.task_options={CHAINS}" for phase in (0, 1)),
    *("stages.0.phases.0.max_steps=200", "stages.0.phases.1.options.skip_rate=0.6"),
    *("stages.0.phases.1.options.error_rate=0.0", "optimizer.learning_rate=1.0e-3", "staleness.max_lag=1"),
    *("learner.steps=6", "learner.groups_per_step=3", "workers.count=1", "evaluation.prompts=0"),
)
AT_ONCE = ("engine.max_concurrent=4", "agent.episodes_per_place=1")
"""So few that two cores start them in a few seconds."""


def write_executable(path: Path, python: str, source: str) -> None:
    """Write a program that runs with this Python."""
    path.write_text(f"#!{python}\n{source}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def success(terminals: Terminals, headway: str, name: str, checkpoint: Path) -> float:
    """Return how many of the held-out chains a model works out, played without the package."""
    asked = ("eval", "agent-arithmetic.yaml", f"prompts.options={CHAINS}", "--prompts", "256", "--json")
    terminal = terminals.open(name, *asked, "--checkpoint", checkpoint, headway=headway)
    terminal.succeeds()
    return float(json.loads(terminal.said.splitlines()[-1])["pass_rate"])


def test_a_model_learns_through_a_package_that_knows_nothing_of_it(terminals: Terminals) -> None:
    directory, headway = terminals.directory("run"), str(terminals.root / "headway")
    main = "import sys\nfrom headway.deploy.cli.main import main\n\nsys.exit(main())\n"
    write_executable(Path(headway), sys.executable, main)
    write_executable(directory / "agent.py", sys.executable, PROGRAM.read_text())
    agent = ("agent.kind=command", "agent.options={command: [./agent.py, chat_completions]}")
    terminals.open("run", "run", "agent-arithmetic.yaml", *SHORT, *AT_ONCE, *agent, headway=headway).succeeds()
    run = directory / "runs" / "agent-arithmetic"
    check_trained(run, steps=6, trajectories_per_step=24, max_lag=1)
    found, played = summary(run), episodes(run)
    assert found["reward_first"] > 0.2
    assert (played["forks_mean"], found["trained_twice"]) == (0.0, 0)
    before = success(terminals, headway, "before", run / "sft")
    after = success(terminals, headway, "after", run)
    print(f"success {before} before and {after} after, {played['turns_mean']:.2f} turns an episode")
    assert before < 0.6
    assert after > before + 0.08
