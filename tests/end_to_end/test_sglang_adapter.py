"""A worker with SGLang trains a run's adapter, which alone is sent to it, and is killed meanwhile."""

import pytest

from headway.learner.config import ModelConfig, RandomModelConfig
from tests.learner.adapted import saved_base
from tests.rollout_workers.marks import SGLANG

from .recipes import MODEL, write_recipe
from .records import check_trained, summary
from .terminals import Terminals
from .test_sglang import kill_with_its_engine
from .unpinned_headway import write_headway
from .watching import attached

pytestmark = SGLANG

STEPS, MAX_LAG = 40, 2
OF_EXPERTS = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob")
DENSE = {
    **MODEL["random"],
    "architecture": "qwen3",
    "config": {key: value for key, value in MODEL["random"]["config"].items() if key not in OF_EXPERTS}
    | {"intermediate_size": 64},
}
"""On a CPU SGLang pads the width between two layers to multiples of 32, and does not pad an adapter."""
OF_ATTENTION = {"targets": ["q_proj", "k_proj", "v_proj", "o_proj"]}
CASES = {"dense": (DENSE, {}), "experts": (MODEL["random"], OF_ATTENTION)}
"""Models and what their adapters change. SGLang takes those of a model with experts if they change attention alone."""


@pytest.mark.parametrize("policy", ["recompute", "finish"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_trains_an_adapter_with_sglang_and_outlives_a_killed_worker(
    terminals: Terminals, case: str, policy: str
) -> None:
    random, targets = CASES[case]
    base = saved_base(ModelConfig(random=RandomModelConfig(**random)), terminals.root / "base")
    recipe = write_recipe(
        terminals.directory("run"),
        model={"path": base.path, "adapter": {"rank": 4, "alpha": 8, **targets}, "random": None},
        learner={"steps": STEPS},
        optimizer={"learning_rate": 2e-2},
        engine={"kind": "sglang"},
        weights={"kv_policy": policy},
        workers={"count": 1},
        staleness={"max_lag": MAX_LAG},
    )
    headway = terminals.open("run", "run", recipe, headway=write_headway(terminals.root))
    run = recipe.parent / "runs" / "tiny"
    with attached(terminals, headway, run) as watch:
        status = watch.until_step(3)
        kill_with_its_engine(status.workers[0].pid)
    headway.succeeds()
    check_trained(run, steps=STEPS, trajectories_per_step=16, max_lag=MAX_LAG)
    assert "the adapter merged" not in (run / "logs" / "learner.log").read_text(), "it says why it sends whole weights"
    found = summary(run)
    assert found["worker_restarts"] == 1, headway.said
    assert found["reward_last"] > 2 * found["reward_first"]
