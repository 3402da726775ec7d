"""A model's directory tells what it lacks from its files, before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError
from deploy.recipe.data_checks import check_data
from deploy.recipe.loading import load_recipe
from learner.models.directory import check_files

TEXT: Any = "1+1="
MESSAGES: Any = [{"role": "user", "content": TEXT}]


def check(tmp_path: Path, files: dict[str, str], prompt: Any, *overrides: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name, content in files.items():
        (model / name).write_text(content)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": prompt, "ground_truth": "2"}) + "\n")
    path = tmp_path / "own.yaml"
    path.write_text(
        f"model: {{path: {model}}}\nprompts: {{kind: jsonl, path: {rows}}}\nrewards: [{{kind: arithmetic}}]\n"
        "evaluation: {prompts: 0}\n"
    )
    check_data(load_recipe(path, overrides), is_new=True)


CONFIG = {"config.json": "{}"}
PLAIN = {**CONFIG, "tokenizer_config.json": "{}"}
CHAT = json.dumps({"chat_template": "{{ messages }}"})


@pytest.mark.parametrize(
    ("files", "prompt", "overrides", "message"),
    [
        ({}, TEXT, (), r"model has no config\.json, so it is no model\. A model's directory has"),
        (CONFIG, TEXT, (), r"model has no tokenizer: its files"),
        (PLAIN, MESSAGES, (), r"rows\.jsonl:1 is a list of messages, but .*model has no chat template; give .*FILE"),
        (PLAIN, TEXT, ("prompts.system_prompt=Add.",), r"system_prompt is set, but .*model has no chat template"),
        (PLAIN, TEXT, ("model.path=~/model",), r"there is no directory ~/model\. `~` stands for itself here\."),
    ],
)
def test_what_is_missing_is_told(
    tmp_path: Path, files: dict[str, str], prompt: Any, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, files, prompt, *overrides)


@pytest.mark.parametrize(
    ("files", "prompt", "overrides"),
    [
        (PLAIN, TEXT, ()),
        ({**CONFIG, "tokenizer_config.json": CHAT}, MESSAGES, ()),
        ({**PLAIN, "chat_template.jinja": "{{ messages }}"}, MESSAGES, ()),
        ({**CONFIG, "vocab.json": "{}"}, MESSAGES, ()),  # only loading it tells
        (PLAIN, MESSAGES, ("launcher.kind=ray",)),  # the model may lie where the learner will run
    ],
)
def test_what_may_be_whole_is_left_to_the_learner(
    tmp_path: Path, files: dict[str, str], prompt: Any, overrides: tuple[str, ...]
) -> None:
    check(tmp_path, files, prompt, *overrides)


def test_a_critics_directory_is_looked_for(tmp_path: Path) -> None:
    def critic(path: str, *overrides: str) -> None:
        ppo = ("algorithm.preset=ppo", f"algorithm.critic.path={path}", "evaluation.prompts=0")
        check_data(load_recipe("arithmetic.yaml", (*ppo, *overrides)), is_new=True)

    with pytest.raises(ConfigError, match=r"algorithm\.critic\.path: there is no directory /nowhere/critic\. Give"):
        critic("/nowhere/critic")
    critic(str(tmp_path))
    check_data(load_recipe("sft-rm-ppo.yaml"), is_new=True)  # an earlier stage leaves its critic
    critic("/nowhere/critic", "launcher.kind=ray")  # the learner has the disk of another machine


def test_a_hub_id_is_no_directory() -> None:
    check_files("nobody/nothing")
