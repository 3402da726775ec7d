"""A run trains an adapter and is resumed; its checkpoints hold the adapter, and are read as the changed model."""

import pytest
import torch

from learner.backends.adapter_files import open_weights
from learner.config import ModelConfig, RandomModelConfig
from tests.learner.adapted import saved_base

from .recipes import MODEL, write_recipe
from .records import check_trained, lines
from .terminals import Terminals

pytestmark = pytest.mark.slow


def test_a_run_trains_an_adapter_and_goes_on_with_it(terminals: Terminals) -> None:
    random = RandomModelConfig(**MODEL["random"])
    base = saved_base(ModelConfig(random=random), terminals.root / "base")
    adapter = {"rank": 4, "alpha": 8}
    recipe = write_recipe(
        terminals.directory("run"),
        model={"path": base.path, "adapter": adapter, "random": None},
        checkpoint={"every_steps": 2},
    )
    terminals.open("run", "run", recipe).succeeds()
    terminals.open("run", "run", recipe, "--resume", "learner.steps=6").succeeds()
    run = recipe.parent / "runs" / "tiny"
    check_trained(run, steps=6, trajectories_per_step=16, max_lag=2)
    assert {line["incarnation"] for line in lines(run / "trained.jsonl")} == {1, 2}
    for log in (run / "logs").glob("worker-*.log"):  # of two processes each, one for each start of the run
        assert 1 <= log.read_text().count("holds the base of adapters") <= 2
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

    terminals.open("run", "replay", run, "--from", "4").succeeds()
    refused = terminals.open("run", "run", recipe, "--resume", "model.adapter=null")
    assert refused.wait() != 0
    assert "model.adapter was" in refused.said
