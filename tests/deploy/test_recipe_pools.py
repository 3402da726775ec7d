"""The further pools of a recipe: their engines, the arguments of their workers, and the settings that are refused."""

import pytest

from headway.broker.errors import ConfigError
from headway.deploy.recipe.pools import pools_of
from headway.deploy.recipe.resolve import load_recipe, recipe_from_bytes, recipe_to_bytes, with_overrides


@pytest.mark.parametrize(
    ("keys", "kind", "options"),
    [
        ("max_concurrent: 4", "vllm", {"enforce_eager": True}),
        ("options: {seed: 1}", "vllm", {"enforce_eager": True, "seed": 1}),
        ("kind: embedded", "embedded", {}),
    ],
)
def test_a_pools_workers_have_the_engine_that_the_recipe_says(keys: str, kind: str, options: dict[str, object]) -> None:
    recipe = load_recipe(
        "arithmetic.yaml",
        [
            "engine.kind=vllm",
            "engine.options={enforce_eager: true}",
            f"workers.pools=[{{name: other, count: 2, engine: {{{keys}}}, devices: [1, 2]}}]",
        ],
    )
    (pool,) = pools_of(recipe)
    assert (pool.name, pool.count, pool.recipe.workers.devices) == ("other", 2, (1, 2))
    assert (pool.recipe.engine.kind, pool.recipe.engine.options) == (kind, options)
    overrides = [each for each in pool.arguments() if each.startswith("engine.")]
    assert with_overrides(recipe_from_bytes(recipe_to_bytes(recipe)), overrides).engine == pool.recipe.engine


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ("[{name: workers}]", r"workers\.pools\[0\]\.name is 'workers', and so is another pool's"),
        ("[{name: a}, {name: a}]", r"workers\.pools\[1\]\.name is 'a', and so is another pool's"),
        ("[{name: '../x'}]", r"workers\.pools\[0\]\.name is '\.\./x'; expected 1 to 100 letters"),
        ("[{name: a, engine: {kin: vllm}}]", r"workers\.pools\[0\]\.engine: unknown key kin; did you mean kind"),
        ("[{name: a, engine: {kind: vlm}}]", r"workers\.pools\[0\]\.engine\.kind: there is no 'vlm'"),
        ("[{name: a, engine: {options: 3}}]", r"workers\.pools\[0\]\.engine: options is 3; expected a mapping"),
        ("[{name: a, count: 2000}]", r"workers\.pools\[0\]\.count is 2000; expected at most 1,024"),
    ],
)
def test_pools_that_cannot_be_are_refused(pools: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("arithmetic.yaml", [f"workers.pools={pools}"])


def test_a_run_without_any_worker_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers\.count is 0, and there is no pool"):
        load_recipe("arithmetic.yaml", ["workers.count=0"])
    assert load_recipe("arithmetic.yaml", ["workers.count=0", "workers.pools=[{name: a}]"]).workers.count == 0
