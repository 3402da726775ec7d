"""A model's directory tells what it lacks from its files, before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError
from deploy.recipe.data_checks import check_data
from deploy.recipe.loading import load_recipe
from learner.models.directory import check_files, positions_of, read_config

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


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 1024}, 1024),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 40960, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 40960, "rope_parameters": {"full_attention": YARN}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA}, 131072),  # which names the stretched ones
        ({"max_position_embeddings": 512, "rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}}, 512),
        ({"model_type": "bloom"}, None),
        ({"text_config": "x"}, None),
        ({"max_position_embeddings": "512"}, None),
        ({"max_position_embeddings": 512, "rope_scaling": "x"}, None),
        ({"max_position_embeddings": 512, "rope_parameters": {"full_attention": None}}, None),
        ({"max_position_embeddings": 512, "rope_scaling": {"factor": "4"}}, None),
        ({"max_position_embeddings": 512, "rope_scaling": {"factor": float("inf")}}, None),
        ({"max_position_embeddings": 512, "rope_scaling": {"factor": 1e308}}, None),
        ({"max_position_embeddings": 10**400, "rope_scaling": {"factor": 2.0}}, None),
        ({"max_position_embeddings": 512, "rope_scaling": {**YARN, "original_max_position_embeddings": "512"}}, None),
    ],
)
def test_positions_are_those_to_which_rotary_ones_are_stretched(config: dict[str, Any], positions: int | None) -> None:
    assert positions_of(config) == positions


def test_a_recipe_beyond_the_models_positions_is_warned_of_once(tmp_path: Path) -> None:
    def told(*overrides: str) -> list[str]:
        said: list[str] = []
        check_data(load_recipe("arithmetic.yaml", overrides), is_new=True, say=said.append)
        return said

    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    (tmp_path / "tokenizer.json").touch()
    path, free = f"model.path={tmp_path}", "prompts={kind: arithmetic}"
    assert told(path, free, "engine.max_model_len=512") == []
    (warning,) = told(path, free, "engine.max_model_len=600")
    assert "engine.max_model_len is 600, but the model was made for texts of 512 tokens (max_position_em" in warning
    assert warning.endswith(" Set engine.max_model_len=512, or take a model for longer texts.")
    (warning,) = told("engine.max_model_len=600", "sampling.max_new_tokens=500")  # of its own random model
    assert "engine.max_model_len=256 and sampling.max_new_tokens (it is 500) below that, or" in warning
    (tmp_path / "config.json").write_text("[")
    assert told(path, free, "engine.max_model_len=600") == []


def test_a_hub_id_is_read_where_it_was_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    downloaded = tmp_path / "models--nobody--here" / "snapshots" / "0"
    downloaded.mkdir(parents=True)
    (downloaded / "config.json").write_text("{}")
    (tmp_path / "models--nobody--here" / "refs").mkdir()
    (tmp_path / "models--nobody--here" / "refs" / "main").write_text("0")
    assert read_config("nobody/here") == {}
    assert read_config("nobody/there") is None
    assert read_config("no id") is None


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
