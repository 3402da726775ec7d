"""A recipe may set these keys, and a wrong one is refused in exactly these words."""

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
    ("override", "message"),
    [
        ("staleness.maxlag=3", "mine.yaml: unknown key staleness.maxlag; did you mean staleness.max_lag?"),
        ("max_lag=3", "mine.yaml: unknown key max_lag; did you mean staleness.max_lag?"),
        (
            "sft.phases[0].kindd=x",
            "mine.yaml: unknown key sft.phases[0].kindd; did you mean sft.phases[0].kind?",
        ),
        (
            "checkpoint.zzz=1",
            "mine.yaml: unknown key checkpoint.zzz. Valid here: every_steps, keep, best, asynchronous, log_bytes,"
            " stage_every_s.",
        ),
        ("staleness.max_lag=-1", f"mine.yaml: staleness.max_lag is -1; expected an integer >= 0 {MAX_LAG}."),
        (
            "staleness.max_lag=two",
            f"mine.yaml: staleness.max_lag is 'two'; expected an integer >= 0 {MAX_LAG}.",
        ),
        (
            "staleness.max_lag=1.5",
            f"mine.yaml: staleness.max_lag is 1.5; expected an integer >= 0 {MAX_LAG}.",
        ),
        (
            "algorithm.aggregation.kind=mean",
            "mine.yaml: algorithm.aggregation.kind is 'mean'; expected one of",
        ),
        (
            "sft.phases[0].until_pass_rate=3",
            "mine.yaml: sft.phases[0].until_pass_rate is 3; expected a number >= 0 and <= 1 (pass"
            " rate on held-out prompts at which the phase ends; 0: it runs all steps).",
        ),
        (
            "prompts.kind=7",
            "mine.yaml: prompts.kind is 7; expected a text (arithmetic, jsonl, parquet,",
        ),
        (
            "rewards=[]",
            "mine.yaml: there are no rewards, which score responses to prompts.",
        ),
        ("optimizer.lr=1", "mine.yaml: unknown key optimizer.lr; did you mean optimizer.learning_rate?"),
        ("seed=1", "mine.yaml: unknown key seed; did you mean run.seed?"),
        ("optimizer.beta=1", "mine.yaml: unknown key optimizer.beta; did you mean optimizer.beta2?"),
        (
            "algorithm.objective.beta=0.1",
            "mine.yaml: unknown key algorithm.objective.beta; did you mean algorithm.objective.options.beta?",
        ),
        (
            "algorithm.critic.lr=1",
            "mine.yaml: unknown key algorithm.critic.lr; did you mean algorithm.critic.learning_rate?",
        ),
        (
            "sft.phases[0].train_batch_size=1",
            "mine.yaml: unknown key sft.phases[0].train_batch_size; did you mean sft.phases[0].batch_size?",
        ),
        ("sft.phases[0].lr=1", "mine.yaml: unknown key sft.phases[0].lr; did you mean sft.phases[0].learning_rate?"),
        (
            "algorithm.epsilon_high=0.3",
            "mine.yaml: unknown key algorithm.epsilon_high; did you mean algorithm.objective.options.clip_high?",
        ),
        ("run=x", "mine.yaml: run is 'x'; expected a section with name, directory, seed, placement."),
        ("algorithm=3", "mine.yaml: algorithm is 3; expected a section of keys."),
        (
            "algorithm.preset=gr",
            "mine.yaml: algorithm.preset: there is no preset 'gr'",
        ),
        ("foo", "The override 'foo' has no '='; write it as key=value, such as staleness.max_lag=4."),
        ("=3", "The override '=3' has no '='; write it as key=value, such as staleness.max_lag=4."),
        (
            "engine.options={a: [1}",
            "The value of the override 'engine.options={a: [1}' is not valid YAML; quote it, such as 'a=\"...\"'.",
        ),
        (
            "sft.phases[7].kind=x",
            "The override of 'sft.phases[7].kind' does not fit the recipe: the list has no item of this number.",
        ),
        (
            "sft.phases=[{max_steps: 3}]",
            "mine.yaml: sft.phases[0].kind is missing; expected a text (arithmetic, jsonl,",
        ),
    ],
)
def test_a_wrong_key_or_value_is_named(recipe_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_path, [override])
    assert str(caught.value).startswith(message)  # where it is cut short, the key's description follows


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.random=null"],
            "no model: set model.path to a Hugging Face directory or id, or describe model.random.",
        ),
        (
            ["learner.updates_per_step=3"],
            "learner.groups_per_step (32) must be a multiple of learner.updates_per_step (3).",
        ),
        (
            ["learner.group_size=1"],
            "learner.group_size is 1, and algorithm.advantage.kind=group_mean_std compares the samples of"
            " one prompt with"
            " each other: every advantage would be 0. Set learner.group_size to 2 or more.",
        ),
        (
            ["sampling.max_new_tokens=64", "engine.max_model_len=64"],
            "sampling.max_new_tokens (64) leaves no room for a prompt in engine.max_model_len (64);"
            " lower the one or"
            " raise the other.",
        ),
        (
            ["weights.transport=nccl"],
            "weights.transport=nccl moves GPU memory, but learner.device is cpu. Set"
            " weights.transport=gloo, or"
            " learner.device=cuda.",
        ),
        (
            ["weights.archive=broker", "weights.delta_chain=0"],
            "weights.archive=broker holds whole versions and the deltas that follow them, and weights.delta_chain=0"
            " makes none. Set weights.delta_chain to 1 or more, or weights.archive=none.",
        ),
        (
            ["weights.staging=device"],
            "weights.staging=device keeps versions on GPUs, and weights.transport=gloo sends host memory. Set"
            " weights.staging=host, or weights.transport=nccl (ipc, where learner and engines share a GPU).",
        ),
        (
            ["evaluation.temperature=0", "evaluation.samples=4"],
            "evaluation.temperature=0 decodes greedily, so all 4 samples of a prompt (evaluation.samples) would be the"
            " same. Set evaluation.samples=1, or a temperature.",
        ),
        (
            ["evaluation.where=workers", "run.placement=colocated"],
            "evaluation.where=workers evaluates beside training, and with run.placement=colocated engines sleep"
            " meanwhile. Set evaluation.where=learner.",
        ),
        (
            ["evaluation.where=workers", "evaluation.every_steps=2", "staleness.max_lag=2"],
            "evaluation.every_steps (2) must be above staleness.max_lag (2) with evaluation.where=workers: a worker"
            " that still evaluates might miss the next version that is to be evaluated.",
        ),
        (
            ["checkpoint.best={}", "evaluation.prompts=0"],
            "checkpoint.best chooses by a metric of evaluations, and evaluation.prompts=0 makes none. Raise"
            " evaluation.prompts, or leave checkpoint.best out.",
        ),
        (
            ["checkpoint.best.mode=min", "evaluation.every_steps=10", "checkpoint.every_steps=4"],
            "checkpoint.best needs checkpoints of the weights that are evaluated: evaluation.every_steps (10) must be a"
            " multiple of checkpoint.every_steps (4).",
        ),
        (
            ["evaluation.where=workers", "weights.staging=none"],
            "evaluation.where=workers has workers keep a version for a while, and with weights.staging=none the next"
            " one overwrites it as it arrives. Set evaluation.where=learner, or weights.staging=host.",
        ),
        (
            ["weights.staging=none", "weights.follow=pull"],
            "weights.staging=none keeps no version beside the engine, and weights.follow=pull keeps one in host memory,"
            " as weights.trust=none does. Set weights.staging=host, or weights.follow=broadcast and"
            " weights.trust=members.",
        ),
        (
            ["weights.staging=none", "weights.trust=none"],
            "weights.staging=none keeps no version beside the engine, and weights.follow=pull keeps one in host memory,"
            " as weights.trust=none does. Set weights.staging=host, or weights.follow=broadcast and"
            " weights.trust=members.",
        ),
        (
            ["weights.trust=none", "weights.tls=false"],
            "weights.trust=none has workers pull over TLS. Leave weights.tls out, or set weights.trust=members.",
        ),
        (
            ["weights.staging=device", "weights.transport=ipc", "learner.device=cuda"],
            "weights.staging=device keeps versions on the GPUs of learner and engines, and one of them runs on a CPU."
            " Set weights.staging=host.",
        ),
        (
            ["workers.devices=[1,2,3]", "engine.kind=vllm", "engine.options.tensor_parallel_size=2"],
            "workers.devices names 3 GPUs, and each worker's engine takes 2 (engine.options.tensor_parallel_size *"
            " engine.options.pipeline_parallel_size): name a multiple of 2; consecutive ones go to one worker.",
        ),
        (
            ["rewards[0].deadline_s=1000"],
            "rewards[0].deadline_s (1000) must be at most half of broker.lease_hold_s (600), or a sample goes"
            " to another worker while its call is repeated.",
        ),
        (
            ["workers.heartbeat_s=20"],
            "workers.heartbeat_s (20) must be at most half of broker.lease_ttl_s (30), or leases"
            " expire under healthy"
            " workers.",
        ),
        (
            ["broker.url=localhost:6379"],
            "broker.url is 'localhost:6379'; expected embedded, redis://host:port, rediss://host:port,"
            " redis+cluster://host:port, rediss+cluster://host:port or unix:///path.",
        ),
        *[
            (
                ["learner.processes=8", f"learner.layout.{key}=2"],
                f"learner.layout.{key} is 2, and learner.backend=fsdp splits by context alone. Set"
                f" learner.layout.{key}=1 and raise learner.processes, or take another backend, such as megatron.",
            )
            for key in ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")
        ],
        (
            ["learner.backend=megatron", "learner.processes=6", "learner.layout={tensor: 2, pipeline: 2}"],
            "learner.layout: learner.processes = 6 (all ranks, of all machines) cannot be divided by"
            " tensor * pipeline * context = 4, the ranks that hold one replica of the model.",
        ),
        (
            ["learner.layout.context=2"],
            "learner.layout: learner.processes = 1 (all ranks, of all machines) cannot be divided by"
            " tensor * pipeline * context = 2, the ranks that hold one replica of the model.",
        ),
        (["learner.device=gpu"], "learner.device is 'gpu'; expected cpu or cuda."),
        (
            ["learner.compute.compile=true"],
            "learner.compute.compile=true needs learner.device=cuda: on a CPU it gains nothing.",
        ),
        (
            ["learner.compute.compile=true", "learner.device=cuda", "learner.backend=megatron"],
            "learner.compute.compile=true needs learner.backend=fsdp: megatron's layers are not compiled.",
        ),
        (
            ["learner.compute.offload_optimizer=true", "learner.backend=megatron"],
            "learner.compute.offload_optimizer=true needs learner.backend=fsdp: megatron shards the optimizer's state"
            " over replicas and context ranks; raise learner.processes.",
        ),
        (
            ["run.placement=colocated", "learner.device=cuda", "engine.kind=vllm", "weights.transport=nccl"],
            "run.placement=colocated has learner and engines on the same GPUs, where weights.transport=nccl has no"
            " place for two ranks. Set weights.transport=ipc.",
        ),
        (
            ["run.placement=colocated", "learner.device=cuda", "engine.kind=vllm", "workers.count=2"],
            "run.placement=colocated puts one engine on each of the learner's GPUs, and workers.count=2 engines of 1"
            " need more than learner.processes=1. Set workers.count=1.",
        ),
        (
            ["run.placement=colocated", "learner.device=cuda"],
            "run.placement=colocated has learner and engines on the same devices, but learner.device is cuda and"
            " engine.device is cpu. Set run.placement=separated, or both to the same.",
        ),
        (
            ["run.placement=colocated", "weights.staging=none"],
            "weights.staging=none receives into the weights that an engine holds, and with run.placement=colocated it"
            " holds none while the learner trains and publishes. Set weights.staging=host.",
        ),
        (
            ["run.placement=colocated", "engine.kind=vllm", "engine.options.enable_sleep_mode=false"],
            "run.placement=colocated needs engines that sleep, and engine.options.enable_sleep_mode is false. Leave it"
            " out, or set run.placement=separated.",
        ),
        (
            ["algorithm.critic.path=scores"],
            "algorithm.critic.path names the model that a critic starts from, and only algorithm.advantage.kind=gae has"
            " one; it is group_mean_std. Set algorithm.preset=ppo, or leave the path out.",
        ),
    ],
)
def test_contradictions_are_explained(recipe_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_path, overrides)
    assert str(caught.value) == f"mine.yaml: {message}"


def test_layouts_and_backends_of_ones_own_pass(recipe_path: Path) -> None:
    layout = "learner.layout={tensor: 2, pipeline: 2, virtual_pipeline: 2, context: 2, expert: 2, expert_tensor: 2}"
    for backend in ("megatron", "mine:Backend"):
        recipe = load_recipe(recipe_path, [f"learner.backend={backend}", "learner.processes=16", layout])
        assert recipe.learner.layout.expert_tensor == 2
    offloaded = ["learner.processes=4", "learner.layout.context=2", "learner.compute.offload_optimizer=true"]
    assert load_recipe(recipe_path, offloaded).learner.compute.offload_optimizer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2", "{path} is not valid YAML: line 2, column 2: did not find expected ',' or ']'."),
        ("a: 1\na: 2\n", "{path} is not valid YAML: line 2, column 1: found duplicate key a."),
        (
            "- a\n",
            "{path} must be a mapping of sections such as `run:` and `learner:`, not a list or a word.",
        ),
        (
            "run: {name: x}",
            "text.yaml: there are no prompts, which workers generate from.",
        ),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    assert str(caught.value).startswith(message.replace("{path}", str(tmp_path / "text.yaml")))


def test_a_missing_recipe_lists_those_that_ship() -> None:
    with pytest.raises(ConfigError, match=r"There is no recipe 'arithmetics.yaml'.*that ship: .*arithmetic.yaml"):
        load_recipe("arithmetics.yaml")


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("algorithm.preset=gpro", "grpo"),
        ("algorithm.preset=dpop", "dppo"),
        ("algorithm.objective.kind=ppo_clp", "ppo_clip"),
        ("algorithm.objective.kind=dop", "dpo"),
        ("algorithm.advantage.kind=group_mean_sd", "group_mean_std"),
        ("algorithm.corrections=[{kind: truncate_is}]", "truncated_is"),
        ("algorithm.aggregation.kind=token_men", "token_mean"),
        ("engine.kind=vlm", "vllm"),
        ("engine.dtype=bfloat61", "bfloat16"),
        ("engine.device=cdua", "cuda"),
        ("learner.backend=fdsp", "fsdp"),
        ("learner.device=cdua:0", "cuda"),
        ("scorers.device=gpu", ""),
        ("model.dtype=bf16", "bfloat16"),
        ("optimizer.schedule=cosin", "cosine"),
        ("weights.transport=glo", "gloo"),
        ("weights.staging=hots", "host"),
        ("staleness.on_straggler=wiat", "wait"),
        ("rewards=[{kind: math_verfy}]", "math_verify"),
        ("stages=[{kind: dpo, options: {data: {path: x}, schedule: cosin}}]", "cosine"),
        ("stages=[{kind: sft, options: {data: {path: x}, too_long: dorp}}]", "drop"),
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
    ("override", "message"),
    [
        ("engine.kind=vlm", r"engine\.kind: there is no 'vlm'; did you mean 'vllm'\?"),
        ("prompts.kind=arithmetics", r"prompts\.kind: there is no 'arithmetics'; did you mean 'arithmetic'\?"),
        ("stages.sft.phases=[{kind: json}]", r"stages\[0\]\.phases\.kind: there is no 'json'; did you mean 'jsonl'\?"),
        (
            "rewards=[{kind: f1}]",
            r"rewards\.kind: there is no 'f1'\. Known: arithmetic, math_verify, reasoning_gym, reward_",
        ),
    ],
)
def test_what_there_is_not_is_refused_with_the_recipe(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("arithmetic.yaml", [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["engine.options={gpu_memory_utilization: 0.5}"],
            "engine.options.gpu_memory_utilization: engine.kind=embedded has no such option. Known: none. It is one of"
            " engine.kind=vllm.",
        ),
        (
            ["engine.options.max_concurent=8"],
            "engine.options.max_concurent: engine.kind=embedded has no such option; did you mean"
            " engine.max_concurrent? Known: none.",
        ),
        (
            ["workers.pools=[{name: a, engine: {options: {x: 1}}}]"],
            "workers.pools[0].engine.options.x: workers.pools[0].engine.kind=embedded has no such option. Known: none.",
        ),
        (
            ["workers.pools=[{name: a, engine: {options: {max_concurent: 8}}}]"],
            "workers.pools[0].engine.options.max_concurent: workers.pools[0].engine.kind=embedded has no such option;"
            " did you mean workers.pools[0].engine.max_concurrent? Known: none.",
        ),
        (
            ["workers.pools=[{name: a, engine: {options: {gpu_memory_utilization: 0.5}}}]"],
            "workers.pools[0].engine.options.gpu_memory_utilization: workers.pools[0].engine.kind=embedded has no such"
            " option. Known: none. It is one of workers.pools[0].engine.kind=vllm.",
        ),
        (
            ["scorers.engine.options={dtyp: float32}"],
            "scorers.engine.options.dtyp: scorers.engine.kind=transformers has no such option; did you mean"
            " scorers.dtype? Known: none.",
        ),
    ],
)
def test_an_option_that_the_engine_does_not_have_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("arithmetic.yaml", overrides)
    assert str(caught.value) == f"arithmetic.yaml: {message}"


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
