"""The cost model of a recipe knows whether the learner's kernels are launched or recorded."""

from pathlib import Path

import pytest

from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.recipe_backends import recipe_cost
from tests.learner.adapted import saved_base
from tests.learner.tiny import model_config

RECIPE = """
model:
  random: {architecture: qwen3, config: {hidden_size: 64, num_hidden_layers: 2}, alphabet: "01+"}
  dtype: bfloat16
prompts: {kind: arithmetic}
rewards: [{kind: arithmetic}]
learner: {device: cuda}
workers: {count: 1}
"""


@pytest.mark.parametrize(
    ("others", "launches"),
    [
        ((), False),
        (("learner.compute.cuda_graphs=never",), True),
        (("learner.processes=2",), True),
        (("learner.backend=megatron",), True),
        (("model.dtype=float32",), True),
        (("run.placement=colocated", "engine.kind=vllm", "engine.device=cuda", "weights.transport=ipc"), True),
    ],
)
def test_recorded_rows_cost_no_launches(others: tuple[str, ...], launches: bool, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    assert (recipe_cost(load_recipe(path, others)).least > 0) is launches


@pytest.mark.parametrize(("adapter", "launches"), [("", False), (", quantize_base: int8", True)])
def test_an_adapter_costs_launches_unless_it_is_recorded(adapter: str, launches: bool, tmp_path: Path) -> None:
    base = saved_base(model_config("qwen3"), tmp_path / "base")
    path = tmp_path / "adapted.yaml"
    rows = RECIPE.splitlines()
    rows[2] = f"  path: {base.path}\n  adapter: {{rank: 4, alpha: 8{adapter}}}"
    path.write_text("\n".join(rows))
    recipe = load_recipe(path, ("learner.compute.cuda_graphs=always",))
    assert (recipe_cost(recipe).least > 0) is launches
