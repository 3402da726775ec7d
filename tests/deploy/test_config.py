"""A recipe may set these keys, and a wrong one is refused by its name."""

import re
from pathlib import Path
from typing import Any

import pytest

from headway.broker.errors import ConfigError
from headway.deploy.recipe import parse, resolve
from headway.deploy.recipe.parse import shipped_recipes
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import dump_recipe, load_recipe, recipe_from_bytes, recipe_to_bytes, with_overrides
from headway.learner.algorithm_config import ADVANTAGES, CORRECTIONS, OBJECTIVES

MINIMAL = """
model: {random: {architecture: qwen3, alphabet: "0123456789+"}}
prompts: {kind: arithmetic}
rewards: [{kind: arithmetic}]
optimizer: {learning_rate: 5e-4}
sft: {phases: [{kind: arithmetic}]}
"""
COLOCATED = "run.placement=colocated"
MAX_LAG = "(no token older than this many steps is ever trained; 0: on-policy)"


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    return path


def load_text(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "text.yaml"
    path.write_text(text)
    return load_recipe(path)


def test_numbers_in_scientific_notation_and_the_name_from_the_file(recipe_path: Path) -> None:
    recipe = load_recipe(recipe_path)
    assert recipe.optimizer.learning_rate == 5e-4
    assert recipe.run.name == "mine"
    assert recipe.run_directory == Path("runs/mine")


def test_overrides_apply_in_order_and_reach_into_lists(recipe_path: Path) -> None:
    overrides = [
        "staleness.max_lag=4",
        "staleness.max_lag=8",
        "rewards[0].weight=2",
        "sft.phases.0.max_steps=3",
    ]
    recipe = load_recipe(
        recipe_path, [*overrides, "engine={kind: vllm, options: {seed: 1}}", "optimizer.learning_rate=1e-3"]
    )
    assert recipe.staleness.max_lag == 8
    assert recipe.rewards[0].weight == 2.0
    assert recipe.sft.phases[0].max_steps == 3
    assert recipe.engine.options == {"seed": 1}
    assert recipe.optimizer.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("prompts.options={}", "prompts.options", {}),
        ("prompts.options={max_operations: 3}", "prompts.options", {"max_operations": 3}),
        ("prompts.options.max_operations=3", "prompts.options", {"min_operations": 2, "max_operations": 3}),
        ("prompts={kind: arithmetic}", "prompts.options", {}),
        ("stages[0].phases[0].options={max_operations: 4}", "stages[0].phases[0].options", {"max_operations": 4}),
        ("algorithm={preset: dppo}", "algorithm.preset", "dppo"),
        ("rewards=[{kind: math_verify}]", "rewards[0].kind", "math_verify"),
        ("learner.layout={context: 1}", "learner.layout.context", 1),
    ],
)
def test_the_value_of_an_override_takes_the_place_of_a_whole_mapping(
    override: str, path: str, value: object, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "base: arithmetic\nprompts: {options: {min_operations: 2, max_operations: 6}}\n"
        "stages: [{kind: sft, phases: [{kind: arithmetic, options: {min_operations: 2}}]}, {kind: rl}]\n"
    )
    found: Any = load_recipe(mine, [override])
    for name, index in re.findall(r"(\w+)(?:\[(\d+)\])?", path):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
        found = found[int(index)] if index else found
    assert found == value


def test_no_archive_is_still_read_by_its_former_name(recipe_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolve._hint_at_no_archive.cache_clear()
    today = load_recipe(recipe_path)
    assert today.weights.archive == "none"
    assert [load_recipe(recipe_path, ["weights.archive=http"]) for _ in range(2)] == [today, today]
    assert caplog.text.count("weights.archive=http is called none now") == 1
    assert recipe_from_bytes(recipe_to_bytes(today).replace(b'"archive":"none"', b'"archive":"http"')) == today


def test_the_resolved_recipe_round_trips(recipe_path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_path, ["algorithm.preset=tis", "algorithm.kl.coefficient=0.1", "run.seed=3"])
    assert load_text(tmp_path, dump_recipe(recipe)) == recipe
    assert recipe_from_bytes(recipe_to_bytes(recipe)) == recipe


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_loads_by_name_and_round_trips(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert load_recipe(name.removesuffix(".yaml")) == recipe
    assert load_text(tmp_path, dump_recipe(recipe)) == recipe


def test_a_preset_lies_beneath_the_users_keys(recipe_path: Path) -> None:
    recipe = load_recipe(recipe_path, ["algorithm.preset=gspo", "algorithm.objective.options.clip_low=0.5"])
    assert recipe.algorithm.objective.kind == "gspo"
    assert recipe.algorithm.objective.options == {"clip_low": 0.5}
    assert recipe.algorithm.aggregation.kind == "sequence_mean"


def test_a_path_replaces_the_random_model(recipe_path: Path) -> None:
    model = load_recipe(recipe_path, ["model.path=somewhere"]).model
    assert (model.path, model.random) == ("somewhere", None)


def test_a_worker_may_change_its_engine(recipe_path: Path) -> None:
    recipe = load_recipe(recipe_path)
    assert with_overrides(recipe, ["engine.kind=vllm"]).engine.kind == "vllm"
    with pytest.raises(ConfigError, match=r"mine: unknown key engine.knd; did you mean engine.kind\?"):
        with_overrides(recipe, ["engine.knd=vllm"])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("staleness.maxlag=3", "unknown key staleness.maxlag; did you mean staleness.max_lag?"),
        ("max_lag=3", "unknown key max_lag; did you mean staleness.max_lag?"),
        ("seed=1", "unknown key seed; did you mean run.seed?"),
        ("sft.phases[0].kindd=x", "unknown key sft.phases[0].kindd; did you mean sft.phases[0].kind?"),
        ("checkpoint.zzz=1", "unknown key checkpoint.zzz. Valid here: every_steps, keep, best"),
        ("optimizer.beta=1", "unknown key optimizer.beta; did you mean optimizer.beta2?"),
        ("algorithm.epsilon_high=0.3", "did you mean algorithm.objective.options.clip_high?"),
        ("sft.phases[0].train_batch_size=1", "did you mean sft.phases[0].batch_size?"),
        ("staleness.max_lag=-1", f"staleness.max_lag is -1; expected an integer >= 0 {MAX_LAG}."),
        ("staleness.max_lag=two", "staleness.max_lag is 'two'; expected an integer"),
        ("algorithm.aggregation.kind=mean", "algorithm.aggregation.kind is 'mean'; expected one of"),
        ("sft.phases[0].until_pass_rate=3", "until_pass_rate is 3; expected a number >= 0 and <= 1 (pass rate"),
        ("prompts.kind=7", "prompts.kind is 7; expected a text (arithmetic, numbered, jsonl,"),
        ("run=x", "run is 'x'; expected a section with name, directory, seed, placement."),
        ("sft.phases=[{max_steps: 3}]", "sft.phases[0].kind is missing; expected a text (arithmetic, calculator,"),
    ],
)
def test_a_wrong_key_or_value_is_named(recipe_path: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=r"^mine\.yaml: ") as caught:
        load_recipe(recipe_path, [override])
    assert told in str(caught.value)  # the key's description may follow


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("model.random=null", "model.path model.random"),
        ("learner.updates_per_step=3", "learner.groups_per_step learner.updates_per_step"),
        ("learner.group_size=1", "learner.group_size algorithm.advantage.kind=group_mean_std"),
        ("sampling.max_new_tokens=64 engine.max_model_len=64", "sampling.max_new_tokens engine.max_model_len"),
        ("weights.transport=nccl", "weights.transport=gloo learner.device=cuda"),
        ("weights.archive=broker weights.delta_chain=0", "weights.delta_chain weights.archive=none"),
        ("weights.staging=device", "weights.staging=host weights.transport=nccl"),
        ("evaluation.temperature=0 evaluation.samples=4", "evaluation.temperature=0 evaluation.samples=1"),
        ("evaluation.where=workers run.placement=colocated", "run.placement=colocated evaluation.where=learner"),
        ("evaluation.where=workers evaluation.every_steps=2", "evaluation.every_steps staleness.max_lag"),
        ("evaluation.where=workers weights.staging=none", "evaluation.where=learner weights.staging=host"),
        ("checkpoint.best={} evaluation.prompts=0", "checkpoint.best evaluation.prompts"),
        (
            "checkpoint.best.mode=min evaluation.every_steps=10 checkpoint.every_steps=4",
            "evaluation.every_steps checkpoint.every_steps",
        ),
        ("weights.staging=none weights.follow=pull", "weights.staging=host weights.follow=broadcast"),
        ("weights.staging=none weights.trust=none", "weights.staging=host weights.trust=members"),
        ("weights.trust=none weights.tls=false", "weights.tls weights.trust=members"),
        ("weights.staging=device weights.transport=ipc learner.device=cuda", "weights.staging=host"),
        (
            "workers.devices=[1,2,3] engine.kind=vllm engine.options.tensor_parallel_size=2",
            "workers.devices engine.options.tensor_parallel_size",
        ),
        ("rewards[0].deadline_s=1000", "rewards[0].deadline_s broker.lease_hold_s"),
        ("workers.heartbeat_s=20", "workers.heartbeat_s broker.lease_ttl_s"),
        ("broker.url=localhost:6379", "broker.url redis://host:port unix:///path"),
        *[
            (f"learner.processes=8 learner.layout.{key}=2", f"learner.layout.{key}=1 megatron")
            for key in ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")
        ],
        (
            "learner.backend=megatron learner.processes=6 learner.layout.tensor=2 learner.layout.pipeline=2",
            "learner.layout learner.processes 6 4",
        ),
        ("learner.layout.context=2", "learner.layout learner.processes 1 2"),
        ("learner.device=gpu", "learner.device cpu cuda"),
        ("learner.compute.compile=true", "learner.compute.compile=true learner.device=cuda"),
        (
            "learner.compute.compile=true learner.device=cuda learner.backend=megatron",
            "learner.compute.compile=true learner.backend=fsdp",
        ),
        (
            "learner.compute.offload_optimizer=true learner.backend=megatron",
            "learner.compute.offload_optimizer=true learner.backend=fsdp",
        ),
        (f"{COLOCATED} learner.device=cuda engine.kind=vllm weights.transport=nccl", "weights.transport=ipc"),
        (f"{COLOCATED} learner.device=cuda engine.kind=vllm workers.count=2", "learner.processes=1 workers.count=1"),
        (f"{COLOCATED} learner.device=cuda", "learner.device engine.device run.placement=separated"),
        (f"{COLOCATED} weights.staging=none", "weights.staging=host"),
        (
            f"{COLOCATED} engine.kind=vllm engine.options.enable_sleep_mode=false",
            "engine.options.enable_sleep_mode run.placement=separated",
        ),
        ("algorithm.critic.path=scores", "algorithm.critic.path algorithm.advantage.kind=gae algorithm.preset=ppo"),
    ],
)
def test_contradictions_name_their_keys(recipe_path: Path, overrides: str, named: str) -> None:
    with pytest.raises(ConfigError, match=r"^mine\.yaml: ") as caught:
        load_recipe(recipe_path, overrides.split())
    assert [word for word in named.split() if word not in str(caught.value)] == []


def test_layouts_and_backends_of_ones_own_pass(recipe_path: Path) -> None:
    layout = "learner.layout={tensor: 2, pipeline: 2, virtual_pipeline: 2, context: 2, expert: 2, expert_tensor: 2}"
    for backend in ("megatron", "mine:Backend"):
        recipe = load_recipe(recipe_path, [f"learner.backend={backend}", "learner.processes=16", layout])
        assert recipe.learner.layout.expert_tensor == 2
    offloaded = ["learner.processes=4", "learner.layout.context=2", "learner.compute.offload_optimizer=true"]
    assert load_recipe(recipe_path, offloaded).learner.compute.offload_optimizer


def test_a_missing_recipe_lists_those_that_ship() -> None:
    with pytest.raises(ConfigError, match=r"There is no recipe 'arithmetics.yaml'.*that ship: .*arithmetic.yaml"):
        load_recipe("arithmetics.yaml")


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("algorithm.preset=gpro", "grpo"),
        ("algorithm.objective.kind=ppo_clp", "ppo_clip"),
        ("algorithm.advantage.kind=group_mean_sd", "group_mean_std"),
        ("algorithm.corrections=[{kind: truncate_is}]", "truncated_is"),
        ("algorithm.aggregation.kind=token_men", "token_mean"),
        ("engine.kind=vlm", "vllm"),
        ("engine.dtype=bfloat61", "bfloat16"),
        ("learner.backend=fdsp", "fsdp"),
        ("scorers.device=gpu", ""),
        ("model.dtype=bf16", "bfloat16"),
        ("optimizer.schedule=cosin", "cosine"),
        ("weights.transport=glo", "gloo"),
        ("rewards=[{kind: math_verfy}]", "math_verify"),
        ("stages=[{kind: dpo, options: {data: {path: x}, schedule: cosin}}]", "cosine"),
        ("sft.phases=[{kind: json}]", "jsonl"),
        ("prompts.kind=arithmetics", "arithmetic"),
    ],
)
def test_a_name_that_is_chosen_from_a_list_is_told_the_nearest(recipe_path: Path, override: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_path, [override])
    assert re.findall(r"did you mean '(\w+)'", str(caught.value)) == ([nearest] if nearest else [])
    assert ("expected" in str(caught.value)) or ("Known" in str(caught.value))


def test_the_parts_of_a_loss_have_the_names_of_the_catalogue() -> None:
    from headway.learner.objective.catalog import PARTS

    for kind, names in {"advantage": ADVANTAGES, "objective": OBJECTIVES, "correction": CORRECTIONS}.items():
        assert set(names) == {*PARTS[kind], *(PARTS["preference"] if kind == "objective" else ())}


@pytest.mark.parametrize("name", ["my recipe.yaml", "mathe-\u00fcbung.yaml", ".yaml", "a.b_c-d.yaml"])
def test_a_run_without_a_name_has_that_of_its_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(MINIMAL)
    found = load_recipe(tmp_path / name).run.name
    expected = {"my recipe.yaml": "my-recipe", ".yaml": "yaml", "a.b_c-d.yaml": "a.b_c-d"}
    assert found == expected.get(name, "mathe--bung")


def test_a_run_name_must_be_fit_for_a_directory(recipe_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.name is '../x'; expected a text \(names the run"):
        load_recipe(recipe_path, ["run.name=../x"])


def test_a_stored_configuration_of_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="this version of Headway cannot read"):
        recipe_from_bytes(b'{"run": {"name": "x"}, "surprise": 1}')


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("engine.options={gpu_memory_utilization: 0.5}", "engine.kind=vllm"),
        ("engine.options.max_concurent=8", "did you mean engine.max_concurrent?"),
        (
            "workers.pools=[{name: a, engine: {options: {max_concurent: 8}}}]",
            "did you mean workers.pools[0].engine.max_concurrent?",
        ),
        ("scorers.engine.options={dtyp: float32}", "did you mean scorers.dtype?"),
    ],
)
def test_an_option_that_the_engine_does_not_have_is_refused(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=r"^arithmetic\.yaml: .*has no such option") as caught:
        load_recipe("arithmetic.yaml", [override])
    assert told in str(caught.value)


@pytest.mark.parametrize("section", ["engine", "scorers.engine"])
def test_an_engine_of_another_kind_is_not_given_the_recipes_options(
    section: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parse._say_unused.cache_clear()
    path, plain = tmp_path / "mine.yaml", {"engine": "embedded", "scorers.engine": "transformers"}[section]
    engine = "{kind: vllm, options: {seed: 1, stream_interval: 2}}"
    path.write_text(f"{MINIMAL}{section.replace('.engine', ': {engine')}: {engine}{'}' * ('.' in section)}\n")

    def options(*overrides: str) -> dict[str, object]:
        recipe = load_recipe(path, overrides)
        return (recipe.engine if section == "engine" else recipe.scorers.engine).options

    assert options() == options(f"{section}.kind=vllm") == {"seed": 1, "stream_interval": 2}
    assert not caplog.text
    assert options(f"{section}.kind={plain}") == options(f"{section}.kind={plain}") == {}
    unused = f"{section}.options.seed, {section}.options.stream_interval."
    said = f"mine.yaml: {section}.kind={plain} takes the place of vllm, whose options are not used: {unused}"
    assert caplog.messages == [said]
    assert options(f"{section}.kind=mine:Engine", f"{section}.options.seed=3") == {"seed": 3}
    with pytest.raises(ConfigError, match=rf"{section}\.options\.x: {section}\.kind={plain} has no such option"):
        options(f"{section}.options.x=3", f"{section}.kind={plain}")


def test_what_is_ones_own_is_looked_for_where_it_is_used() -> None:
    load_recipe("arithmetic.yaml", ["engine.kind=mine:Engine", "rewards=[{kind: 'mine:reward'}]"])
