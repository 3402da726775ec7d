"""A resumed run may change these keys and no others; every key has an answer, and the refusals name a remedy."""

from pathlib import Path

import msgspec
import pytest

from headway.broker.errors import ConfigError
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import dump_recipe, load_recipe
from headway.deploy.run.resumable_keys import ANEW, FIXED, FREE, RAISED, check_resumable, keys_of
from headway.deploy.run.run_directory import prepare
from headway.learner.experience.log import Rewind


def test_every_key_is_in_exactly_one_class() -> None:
    classes = [*FIXED, *ANEW, *RAISED, *FREE]
    assert sorted(classes) == sorted(keys_of(Recipe))


def resume(directory: Path, *overrides: str, regenerate: bool = False) -> None:
    """Resume as `--resume` with these overrides would, up to the point where it starts processes."""
    recipe = load_recipe("arithmetic.yaml", (f"run.directory={directory}", *overrides))
    check_resumable(recipe, Rewind(step=4, regenerate=True) if regenerate else None)
    prepare(recipe, resume=True, overwrite=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    prepare(load_recipe("arithmetic.yaml", [f"run.directory={tmp_path}"]), resume=False, overwrite=False)
    return tmp_path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=7", r"run.seed was 0 and is 7 now: .* start a new run \(run.name=...\) from model.path=CHECKPOINT"),
        ("prompts.options.max_operations=9", r"prompts\.options\.max_operations was 6 and is 9 now: .* another prompt"),
        ("model.path=elsewhere", 'model.path was "" and is "elsewhere" now: the checkpoint\'s weights'),
        ("sft.phases=[]", "the stages before the learner are over"),
        ("learner.groups_per_step=8", r"was 32 and is 8 now: .* \(--rewind-to STEP --regenerate\)"),
        ("sampling.temperature=0.5", "sampling.temperature was 1.0 and is 0.5 now: samples that wait"),
        (
            "teacher.path=. algorithm.distillation.coefficient=1",
            r"was 0\.0 and is 1\.0 now: samples .* have a teacher's logprobs, or",
        ),
        (
            "algorithm.distillation.top_k=4",
            r"top_k was 0 and is 4 now: samples .* so many candidates of a teacher",
        ),
        ("sampling.max_new_tokens=8", "may only be raised: samples that are under way may be longer"),
    ],
)
def test_what_cannot_change_is_refused_with_words(directory: Path, override: str, message: str) -> None:
    before = (directory / "arithmetic" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=message):
        resume(directory, *override.split())
    assert (directory / "arithmetic" / "config.yaml").read_text() == before


def test_what_changes_without_being_refused_is_said(directory: Path) -> None:
    vllm = (f"run.directory={directory}", "engine.kind=vllm")
    first = load_recipe("arithmetic.yaml", (*vllm, "optimizer.learning_rate=0.25"))
    prepare(first, resume=True, overwrite=False)
    said: list[str] = []
    check_resumable(first, None, said.append)
    assert said == []
    forgotten = load_recipe("arithmetic.yaml", (*vllm, "engine.options={x: 1}"))
    check_resumable(forgotten, None, said.append)
    assert "engine.options.x is 1 (not set before), optimizer.learning_rate is 0.0005 (0.25 before). The" in said[0]


def test_a_change_within_a_list_names_its_place_and_what_older_versions_left_out_is_none(tmp_path: Path) -> None:
    def of(weight: float, options: str) -> Recipe:
        rewards = f"rewards=[{{kind: arithmetic}}, {{kind: reasoning_gym, weight: {weight}}}]"
        metrics = f"metrics=[{{kind: jsonl}}, {{kind: prometheus, options: {options}}}]"
        phases = ["stages=[]", "sft.phases=[{kind: arithmetic}]"]
        return load_recipe("arithmetic.yaml", [f"run.directory={tmp_path}", *phases, rewards, metrics])

    prepare(of(1.0, "{}"), resume=False, overwrite=False)
    path = tmp_path / "arithmetic" / "settings.json"
    settings = msgspec.json.decode(path.read_bytes())
    for older in (*settings["rewards"], *settings["sft"]["phases"]):
        del older["deadline_s"]
    path.write_bytes(msgspec.json.encode(settings))
    said: list[str] = []
    check_resumable(of(1.0, "{}"), None, said.append)
    assert said == []
    check_resumable(of(0.5, "{port: 0}"), None, said.append)
    changes = "metrics[1].options.port is 0 (not set before), rewards[1].weight is 0.5 (1.0 before)"
    assert f"start: {changes}. The" in said[0]


def test_long_values_are_cut_before_they_differ(directory: Path) -> None:
    base = [f"run.directory={directory}", "model.chat_template=" + "a" * 80 + "%s" + "b" * 90]
    prepare(load_recipe("arithmetic.yaml", [base[0], base[1] % "x"]), resume=True, overwrite=False)
    with pytest.raises(ConfigError, match=r"template was \.\.\.a{20}xb{33}\.\.\. and is \.\.\.a{20}yb{33}\.\.\. now"):
        resume(directory, base[1] % "y")


def test_what_may_change(directory: Path) -> None:
    resume(directory, "learner.steps=500", "learner.group_size=4", "optimizer.learning_rate=1e-6", "workers.count=1")
    resume(directory, "sampling.max_new_tokens=60", "engine.max_model_len=4000", "staleness.max_lag=0")
    resume(directory, "sampling.max_new_tokens=60", "engine.max_model_len=4000", "broker.url=redis://ali:x@h:1")


def test_what_may_change_where_all_is_generated_anew(directory: Path) -> None:
    resume(directory, "learner.groups_per_step=8", "sampling.temperature=0.5", regenerate=True)
    resume(directory, "learner.groups_per_step=8", "sampling.temperature=0.5")
    with pytest.raises(ConfigError, match="groups_per_step was 8 and is 32 now"):
        resume(directory, "sampling.temperature=0.5")
    with pytest.raises(ConfigError, match=r"run\.seed was 0"):
        resume(directory, "run.seed=1", regenerate=True)


def test_settings_that_do_not_say_how_an_adapters_base_is_held_are_of_the_same_run(tmp_path: Path) -> None:
    own = [f"run.directory={tmp_path}", "model.adapter={rank: 4, stages: [rl]}"]
    prepare(load_recipe("arithmetic.yaml", own), resume=False, overwrite=False)
    path = tmp_path / "arithmetic" / "settings.json"
    settings = msgspec.json.decode(path.read_bytes())
    assert settings["model"]["adapter"].pop("quantize_base") == "none"
    path.write_bytes(msgspec.json.encode(settings))
    check_resumable(load_recipe("arithmetic.yaml", own), None)
    with pytest.raises(ConfigError, match=r"model\.adapter\S* was"):
        check_resumable(
            load_recipe("arithmetic.yaml", [*own, "model.adapter={rank: 4, stages: [rl], quantize_base: int8}"]), None
        )


def test_a_run_of_before_there_was_a_seed_keeps_its_last_rows_held_out(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"base: arithmetic\nrun: {{directory: {tmp_path}}}\n"
        "prompts: {kind: jsonl, path: rows.jsonl, options: {held_out_rows: 2}}\n"
        "stages: [{kind: dpo, options: {data: {path: pairs.jsonl}, held_out_records: 3}}]\n"
    )
    new = load_recipe(recipe)
    assert (new.prompts.options["held_out_seed"], new.stages[0].options["held_out_seed"]) == (0, 0)
    prepare(new, resume=False, overwrite=False)
    directory = tmp_path / "mine"
    for path in (directory / "config.yaml", directory / "settings.json"):  # as the version before wrote them
        older = "".join(line for line in path.read_text().splitlines(True) if "held_out_seed:" not in line)
        path.write_text(older.replace('"held_out_seed":0,', ""))
    resumed = load_recipe(directory / "config.yaml")
    assert (resumed.prompts.options["held_out_seed"], resumed.stages[0].options["held_out_seed"]) == (None, None)
    check_resumable(resumed, None)
    with pytest.raises(ConfigError, match=r"prompts\.options\.held_out_seed was null and is 0 now"):
        check_resumable(new, None)
    kept = ["prompts.options.held_out_seed=null", "stages.dpo.options.held_out_seed=null"]
    check_resumable(load_recipe(recipe, kept), None)
    assert load_recipe(recipe, kept) == resumed


def test_an_edited_config_is_compared_with_what_the_run_was_started_with(directory: Path) -> None:
    path = directory / "arithmetic" / "config.yaml"
    edited = load_recipe(path, ["learner.groups_per_step=8"])
    path.write_text(dump_recipe(edited))
    with pytest.raises(ConfigError, match="groups_per_step was 32"):
        check_resumable(load_recipe(path), None)
    (directory / "arithmetic" / "settings.json").unlink()  # older runs have none
    check_resumable(load_recipe(path), None)
    path.write_text("learner: {groups_per_step: 4}\n")
    with pytest.raises(ConfigError, match="groups_per_step was 4"):
        check_resumable(edited, None)
