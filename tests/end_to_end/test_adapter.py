"""A run trains an adapter, is killed and resumed; checkpoints hold the adapter, and are read as the changed model."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.learner.backends.adapter import open_weights
from headway.learner.config import ModelConfig, RandomModelConfig
from tests.learner.adapted import saved_base

from .recipes import MODEL, write_recipe
from .records import check_trained, lines, summary
from .terminals import Terminals
from .watching import watching

pytestmark = pytest.mark.slow

RUN, STEPS = "killed", 20
LEARNS = {"learning_rate": 2e-2}
"""With it the mean reward of thirteen runs rose by 0.2 to 0.48."""


def adapted_recipe(directory: Path, base: str, **sections: Any) -> Path:
    model = {"path": base, "adapter": {"rank": 4, "alpha": 8}, "random": None}
    return write_recipe(directory, model=model, **sections)


def make_base(terminals: Terminals) -> ModelConfig:
    return saved_base(ModelConfig(random=RandomModelConfig(**MODEL["random"])), terminals.root / "base")


def test_a_run_trains_an_adapter_on_megatron_and_goes_on_with_it_split_over_two_ranks(terminals: Terminals) -> None:
    base = make_base(terminals)
    learner = {"steps": 4, "backend": "megatron"}
    recipe = adapted_recipe(terminals.directory("run"), base.path, checkpoint={"every_steps": 2}, learner=learner)
    terminals.open("run", "run", recipe).succeeds()
    more = "learner.steps=6", "learner.processes=2", "learner.layout.tensor=2"
    terminals.open("run", "run", recipe, "--resume", *more).succeeds()
    run = recipe.parent / "runs" / "tiny"
    check_trained(run, steps=6, trajectories_per_step=16, max_lag=2)
    assert {line["incarnation"] for line in lines(run / "trained.jsonl")} == {1, 2}
    for log in (run / "logs").glob("worker-*.log"):  # of two processes each, one for each start of the run
        assert 1 <= log.read_text().count("holds the base of adapters") <= 2
        assert f"mapped from the files in {base.path}" in log.read_text()
    first, last = run / "checkpoints" / "1" / "step_4", run / "checkpoints" / "2" / "step_6"
    assert not list(last.glob("*.safetensors"))
    before, after, untrained = (open_weights(str(path)) for path in (first, last, base.path))
    assert before is not None
    assert after is not None
    assert untrained is not None
    for name in after.names:
        has_changed = not torch.equal(after(name), untrained(name))
        assert has_changed is (not torch.equal(after(name), before(name))) is name.endswith("_proj.weight")
    terminals.open("run", "export", run, "--adapter", "--out", "out").succeeds()

    refused = terminals.open("run", "run", recipe, "--resume", "model.adapter=null")
    assert refused.wait() != 0
    assert "model.adapter was" in refused.said


def test_killed_workers_and_learners_train_the_adapter_of_a_run_without_a_break(terminals: Terminals, url: str) -> None:
    base = make_base(terminals)
    recipe = adapted_recipe(
        terminals.directory("learner"),
        base.path,
        learner={"steps": STEPS},
        optimizer=LEARNS,
        checkpoint={"every_steps": 4, "keep": STEPS // 4},
    )
    run = terminals.root / "learner" / "runs" / RUN
    workers = terminals.open("workers", "workers", "--count", "2", *of_run(url))
    with watching(url, RUN, terminals) as watch:
        first = terminals.open("learner", "learner", recipe, *of_run(url))
        status = watch.until("both generate", lambda status: sum(one.submitted > 0 for one in status.workers) == 2)
        os.kill(status.workers[0].pid, signal.SIGKILL)
        merged_only = terminals.open("other", "workers", "engine.kind=sglang", *of_run(url))
        terminals.expect_failure(merged_only)
        watch.until_step(6)
        watch.until_durable(run / "checkpoints" / "1" / "step_4")
        first.send(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        second = terminals.open("learner", "learner", recipe, "--resume", *of_run(url))
        watch.until("it has ended", lambda status: status.state == "finished")
    second.succeeds()
    workers.succeeds()
    check_trained(run, steps=STEPS, trajectories_per_step=16, max_lag=2)
    found = summary(run)
    assert found["reward_last"] > found["reward_first"] + 0.06
    trained = [(line["incarnation"], line["step"]) for line in lines(run / "trained.jsonl")]
    assert {(1, 5), (2, 5), (2, STEPS - 1)} <= set(trained), "steps after the checkpoint are trained again"
    assert [version.step for version in watch.announced] == sorted(version.step for version in watch.announced)
    assert merged_only.wait() != 0
    assert "carry an adapter alone, and this worker's engine (sglang) takes whole weights" in merged_only.said

    replaying = terminals.open("learner", "replay", RUN)
    replaying.succeeds()
    assert f"Loss and gradient norm of all {STEPS} steps equal the original's, bit for bit." in replaying.said
    for incarnation, step in ((1, 4), (2, 8), (2, STEPS)):
        assert (
            f"The weights at step {step} equal those of runs/{RUN}/checkpoints/{incarnation}/step_{step}"
            in replaying.said
        )


def of_run(url: str) -> tuple[str, ...]:
    return "--broker", url, "--run", RUN
