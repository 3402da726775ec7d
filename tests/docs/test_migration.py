"""The page for users of verl and TRL names keys that there are, and its recipe is what it says."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.broker.errors import UnknownKeysError
from headway.deploy.recipe.convert import foreign_keys
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.run.resumable_keys import keys_of
from headway.learner.data.prompts.files import FileOptions
from headway.learner.objective.catalog import functions
from headway.rollout_workers.engines.abilities import VLLM_SIZES_AND_SWITCHES, VLLM_WORDS

from .pages import ROOT, whole_recipe

PAGE = (ROOT / "docs" / "guides" / "from-verl-and-trl.md").read_text()
VERLS = PAGE.partition("## A command of verl, translated")[2]
REWARD = "reward.custom_reward_function"
FOREIGN_KEYS = foreign_keys()["verl"] | foreign_keys()["trl"]


def named_keys() -> Iterator[str]:
    """Yield the keys in the first column of the page's tables, those that stand behind a comma with their section."""
    for first in re.findall(r"^\| (`[^|]*) \|", PAGE, re.M):
        section = ""
        for word in re.findall(r"`([a-z_.=\[\]0-9]+)`", first):
            key = word.partition("=")[0]
            section = key.rpartition(".")[0] if "." in key else section
            yield key if "." in key or key in ("metrics", "rewards") else f"{section}.{key}"


def test_every_key_of_the_page_is_a_key_of_a_recipe() -> None:
    keys = list(keys_of(Recipe))
    named = list(named_keys())
    assert named
    unknown = [name for name in named if not any(re.match(rf"{re.escape(key)}($|[.\[])", name) for key in keys)]
    assert unknown == []


def test_an_error_names_the_key_that_the_page_names() -> None:
    rows = [line.split("|")[1:4] for line in PAGE.partition("## Keys")[2].splitlines() if line.startswith("| `")]
    pairs = [(row[0].strip(" `"), name) for row in rows for name in re.findall(r"`([\w.]+)[^`]*`", row[1] + row[2])]
    known = [(ours, name) for ours, name in pairs if name in FOREIGN_KEYS or name.rpartition(".")[2] in FOREIGN_KEYS]
    assert known
    wrong = []
    for ours, name in known:
        key, remark = FOREIGN_KEYS.get(name) or FOREIGN_KEYS[name.rpartition(".")[2]]
        if key.rpartition(".")[2] not in ours and ours not in remark:
            wrong.append((ours, name))
    assert wrong == []


def test_every_answer_is_a_key_of_a_recipe_or_a_sentence() -> None:
    sections = {key.rpartition(".")[0] for key in keys_of(Recipe)}
    keys = {*keys_of(Recipe), *sections}
    for name, ours in FOREIGN_KEYS.items():
        assert ours.key or ours.remark, name
        assert not ours.remark or ours.remark.endswith("."), name
        section, options, option = ours.key.rpartition(".options.")
        if section == "engine":
            assert option in {*VLLM_SIZES_AND_SWITCHES, *VLLM_WORDS}, name
        elif section == "prompts":
            assert option in FileOptions.__struct_fields__, name
        elif options:
            assert any(option in one.defaults for one in functions()), name
        else:
            assert not ours.key or ours.key in keys or ours.key.startswith("model.adapter."), name


def recipe_below(heading: str, tmp_path: Path) -> Recipe:
    """Return the first recipe of a section of the page."""
    block = re.findall(r"^```yaml\n(.*?)^```", PAGE.partition(f"## {heading}\n")[2], re.M | re.S)[0]
    path = tmp_path / "own.yaml"
    path.write_text(whole_recipe(block))
    return load_recipe(path)


def test_the_recipe_is_the_translation_of_the_script(tmp_path: Path) -> None:
    recipe = recipe_below("A script of TRL, translated", tmp_path)
    script = PAGE.split("```python")[1].split("```")[0]
    trl = {name: value.strip('"') for name, value in re.findall(r"(\w+)=([\w\"./-]+)", script)}
    learner, optimizer = recipe.learner, recipe.optimizer
    completions = int(trl["per_device_train_batch_size"]) * int(trl["gradient_accumulation_steps"])
    assert learner.groups_per_step * learner.group_size == completions
    assert (learner.group_size, learner.updates_per_step) == (int(trl["num_generations"]), 1)
    assert learner.steps == int(trl["max_steps"])
    assert (optimizer.learning_rate, optimizer.schedule) == (float(trl["learning_rate"]), trl["lr_scheduler_type"])
    assert optimizer.warmup_steps == int(trl["warmup_steps"])
    assert recipe.sampling.max_new_tokens == int(trl["max_completion_length"])
    assert recipe.algorithm.mask_truncated == (trl["mask_truncated_completions"] == "True")
    assert recipe.algorithm.entropy_coefficient == float(trl["entropy_coef"])
    assert f"reward_weights={[reward.weight for reward in recipe.rewards]}" in script
    assert recipe.checkpoint.every_steps == int(trl["save_steps"])


def verls_overrides() -> list[str]:
    """Return the overrides of the page's command of verl."""
    return [word for word in shlex.split(VERLS.split("```sh")[1].split("```")[0]) if "=" in word]


def test_every_key_of_the_command_is_answered(tmp_path: Path) -> None:
    overrides = verls_overrides()
    (tmp_path / "own.yaml").write_text(whole_recipe(""))
    with pytest.raises(UnknownKeysError) as caught:
        load_recipe(tmp_path / "own.yaml", overrides)
    first, *lines = str(caught.value).splitlines()
    assert first == f"own.yaml has {len(overrides)} unknown keys:"
    told = [path for line in lines for path in re.split(r"; did you mean|\. [A-Z]", line)[0].split(", ")]
    assert sorted(told) == sorted(word.partition("=")[0] for word in overrides)
    assert not [line for line in lines if "Valid here" in line]


def test_the_recipe_is_the_translation_of_the_command(tmp_path: Path) -> None:
    recipe = recipe_below("A command of verl, translated", tmp_path)
    given = dict(override.split("=", 1) for override in verls_overrides())
    verl = {key.rpartition(".")[2]: value for key, value in given.items()}
    learner, engine, options = recipe.learner, recipe.engine, recipe.algorithm.objective.options
    assert learner.groups_per_step == int(verl["train_batch_size"])
    assert learner.updates_per_step == int(verl["train_batch_size"]) / int(verl["ppo_mini_batch_size"])
    assert learner.group_size == int(verl["n"])
    assert learner.micro_batch_tokens == int(verl["ppo_max_token_len_per_gpu"])
    assert recipe.sampling.max_new_tokens == int(verl["max_response_length"])
    assert engine.max_model_len == int(verl["max_prompt_length"]) + int(verl["max_response_length"])
    assert engine.options["gpu_memory_utilization"] == float(verl["gpu_memory_utilization"])
    assert engine.options["tensor_parallel_size"] == int(verl["tensor_model_parallel_size"])
    assert (options["clip_low"], options["clip_high"]) == (
        float(verl["clip_ratio_low"]),
        float(verl["clip_ratio_high"]),
    )
    assert recipe.algorithm.kl.coefficient == float(verl["kl_loss_coef"])
    assert recipe.optimizer.learning_rate == float(verl["lr"])
    assert learner.steps == int(verl["total_epochs"]) * (7473 // int(verl["train_batch_size"]))
    assert recipe.sampling.temperature == float(verl["temperature"])
    assert recipe.checkpoint.every_steps == int(verl["save_freq"])
    assert recipe.evaluation.every_steps == int(verl["test_freq"])
    assert [sink.options.get("project") for sink in recipe.metrics] == [None, verl["project_name"]]
    assert recipe.prompts.path == verl["train_files"]
    assert recipe.prompts.options == {"held_out_path": verl["val_files"]}
    assert [reward.kind for reward in recipe.rewards] == [f"my_rewards:{given[f'{REWARD}.name']}"]
