"""The page for users of verl and TRL names keys that there are, and its recipe is what it says."""

import re
from collections.abc import Iterator
from pathlib import Path

from deploy.recipe.loading import load_recipe
from deploy.recipe.other_names import OTHER_NAMES
from deploy.recipe.recipe import Recipe
from deploy.run.resuming import keys_of

from .pages import ROOT, whole_recipe

PAGE = (ROOT / "docs" / "guides" / "from-verl-and-trl.md").read_text()


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
    assert len(named) > 50
    unknown = [name for name in named if not any(re.match(rf"{re.escape(key)}($|[.\[])", name) for key in keys)]
    assert unknown == []


def test_an_error_names_the_key_that_the_page_names() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    # the page names the parts of one setting, such as `algorithm.kl.coefficient`, `kind=k3`, in one line
    wrong = {
        name: key
        for name, key in OTHER_NAMES.items()
        if not any(key.rpartition(".")[2] in line and re.search(rf"[`._]{name}\b", line) for line in lines)
    }
    assert wrong == {}


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


def test_the_recipe_is_the_translation_of_the_configuration(tmp_path: Path) -> None:
    recipe = recipe_below("A configuration of verl, translated", tmp_path)
    given = dict(re.findall(r"([\w.]+)=(\S+)", PAGE.split("```text")[1].split("```")[0]))
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
