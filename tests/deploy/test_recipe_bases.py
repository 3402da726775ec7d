"""A recipe holds only the keys in which it differs from its base."""

from pathlib import Path

import pytest

from headway.broker.errors import ConfigError
from headway.deploy.recipe import parse
from headway.deploy.recipe.resolve import dump_recipe, load_recipe


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_recipe_lies_over_its_base_and_is_named_after_its_own_file(tmp_path: Path) -> None:
    mine = write(tmp_path, "mine.yaml", "base: arithmetic\nlearner: {steps: 7}\nrewards: [{kind: math_verify}]\n")
    hints = list[str]()
    recipe, base = load_recipe(mine, hint=hints.append), load_recipe("arithmetic")
    assert (recipe.learner.steps, recipe.run.name) == (7, "mine")
    assert recipe.learner.group_size == base.learner.group_size
    assert [reward.kind for reward in recipe.rewards] == ["math_verify"]
    assert load_recipe(write(tmp_path, "resolved.yaml", dump_recipe(recipe))) == recipe
    assert hints == []


@pytest.mark.parametrize(
    ("own", "options"),
    [
        ("prompts: {options: {max_operations: 3}}", {"min_operations": 1, "max_operations": 3}),
        ("prompts: {options: {}}", {}),
    ],
)
def test_an_empty_mapping_takes_the_bases_away(own: str, options: dict[str, int], tmp_path: Path) -> None:
    write(tmp_path, "below.yaml", "base: arithmetic\nprompts: {options: {min_operations: 1, max_operations: 2}}\n")
    write(tmp_path, "middle.yaml", f"base: below.yaml\n{own}\n")
    assert load_recipe(write(tmp_path, "mine.yaml", "base: middle.yaml\n")).prompts.options == options


def test_the_last_of_several_bases_counts_and_lies_beside_the_recipe(tmp_path: Path) -> None:
    write(tmp_path, "below/fewer.yaml", "base: most.yaml\nlearner: {steps: 5}\n")
    write(tmp_path, "below/most.yaml", "learner: {steps: 9, group_size: 2}\n")
    recipe = load_recipe(write(tmp_path, "mine.yaml", "base: [arithmetic, below/fewer.yaml]\n"))
    assert (recipe.learner.steps, recipe.learner.group_size) == (5, 2)


def test_references_reach_into_the_base_and_overrides_lie_above(tmp_path: Path) -> None:
    mine = write(
        tmp_path, "mine.yaml", "base: arithmetic\nevaluation: {prompts: '${learner.steps}'}\nlearner: {steps: 6}\n"
    )
    assert load_recipe(mine).evaluation.prompts == 6
    assert load_recipe(mine, ["learner.steps=8"]).learner.steps == 8


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("{max_concurrent: 8}", {"gpu_memory_utilization": 0.9}),
        ("{kind: embedded, device: cpu}", {}),
        ("{kind: sglang, options: {page_size: 1}}", {"page_size": 1}),
    ],
)
def test_an_engine_of_another_kind_leaves_the_options_of_the_base_out(
    engine: str, options: dict[str, object], tmp_path: Path
) -> None:
    mine = write(tmp_path, "mine.yaml", f"base: gpu/qwen3-8b\nengine: {engine}\n")
    assert load_recipe(mine).engine.options == options


@pytest.mark.parametrize(
    ("below", "above", "scorers"),
    [
        ("vllm", "${scorers.engine.kind}", "vllm"),
        ("${scorers.engine.kind}", "vllm", "vllm"),
        ("${scorers.engine.kind}", "vllm", "${engine.kind}"),
    ],
)
def test_an_engine_whose_kind_is_a_reference_keeps_the_options_of_the_base(
    below: str, above: str, scorers: str, tmp_path: Path
) -> None:
    write(tmp_path, "below.yaml", f"base: arithmetic\nengine: {{kind: '{below}', options: {{enforce_eager: true}}}}\n")
    text = f"base: below.yaml\nengine: {{kind: '{above}'}}\nscorers: {{engine: {{kind: '{scorers}'}}}}\n"
    engine = load_recipe(write(tmp_path, "mine.yaml", text)).engine
    assert (engine.kind, engine.options) == ("vllm", {"enforce_eager": True})


@pytest.mark.parametrize(
    ("below", "above", "former"),
    [
        ("${scorers.engine.kind}", "embedded", "vllm"),
        ("${..scorers.engine.kind}", "embedded", "vllm"),
        ("${oc.env:NO_ENGINE}", "embedded", "${oc.env:NO_ENGINE}"),
        ("vllm", "${run.name}", "vllm"),
    ],
)
def test_a_recipe_chooses_another_engine_than_a_reference_leads_to(
    below: str, above: str, former: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parse._say_unused.cache_clear()
    write(tmp_path, "below.yaml", f"base: arithmetic\nengine: {{kind: '{below}', options: {{enforce_eager: true}}}}\n")
    text = f"base: below.yaml\nengine: {{kind: '{above}', options: {{}}}}\nrun: {{name: embedded}}\n"
    engine = load_recipe(write(tmp_path, "mine.yaml", f"{text}scorers: {{engine: {{kind: vllm}}}}\n")).engine
    assert (engine.kind, engine.options) == ("embedded", {})
    [told] = caplog.messages
    assert told.endswith(
        f"engine.kind=embedded takes the place of {former}, whose options are not used: engine.options.enforce_eager."
    )


def test_an_override_names_another_base(tmp_path: Path) -> None:
    write(tmp_path, "other.yaml", "base: arithmetic\nlearner: {steps: 3}\n")
    mine = write(tmp_path, "mine.yaml", "base: arithmetic\nrun: {seed: 5}\n")
    recipe = load_recipe(mine, [f"base={tmp_path}/other.yaml"])
    assert (recipe.learner.steps, recipe.run.seed) == (3, 5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("base: missing.yaml\n", "There is no recipe 'missing.yaml'.* ship: .*gpu/qwen3-8b.yaml"),
        ("base: {kind: arithmetic}\n", "base must be the name of a recipe or a list of names, not"),
        ("base: [3]\n", "base must be the name of a recipe or a list of names, not"),
        ("base: mine.yaml\n", "mine.yaml is its own base, by way of mine.yaml"),
        ("base: arithmetic\nlearner: {stepz: 3}\n", "mine.yaml: unknown key learner.stepz; did you mean learner.steps"),
        ("bas: arithmetic\n", "mine.yaml: unknown key bas"),
        ("base: arithmetic\nstages: {kind: rl}\n", "mine.yaml has a list where its base has a mapping"),
    ],
)
def test_a_wrong_base_is_told(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        load_recipe(write(tmp_path, "mine.yaml", text))
