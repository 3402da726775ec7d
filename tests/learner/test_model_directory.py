"""A model's directory tells what it lacks from its files, before anything is loaded."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from headway.broker.errors import ConfigError
from headway.deploy.recipe.preflight import check_data
from headway.deploy.recipe.resolve import load_recipe
from headway.learner.config import ModelConfig, RandomModelConfig
from headway.learner.models import directory_checks
from headway.learner.models.directory_checks import (
    check_config_sizes,
    check_files,
    check_named_tokens,
    positions_of,
    read_config,
)
from headway.learner.models.pretrained import load_config

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


EMPTY = "\x02\0\0\0\0\0\0\0{}"
"""A safetensors file without tensors."""
CONFIG = {"config.json": "{}", "model.safetensors": EMPTY}
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
        (PLAIN, TEXT, ("model.path=runs/own/checkpoints/1/step_9",), r"there is no directory runs/own/checkpoints"),
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
        ({"max_position_embeddings": 512, "rope_scaling": "x"}, None),
        ({"max_position_embeddings": 512, "rope_parameters": {"full_attention": None}}, None),
        ({"max_position_embeddings": 512, "rope_scaling": {"factor": float("inf")}}, None),
        ({"max_position_embeddings": 10**400, "rope_scaling": {"factor": 2.0}}, None),
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
    (tmp_path / "model.safetensors").write_text(EMPTY)
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


def header(tensors: dict[str, tuple[str, list[int], int, int]]) -> bytes:
    """Return the table of contents of a safetensors file: each tensor's type, shape, first byte and end."""
    table = {
        name: {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        for name, (kind, shape, begin, end) in tensors.items()
    }
    content = json.dumps(table).encode()
    return len(content).to_bytes(8, "little") + content


INDEX = "model.safetensors.index.json"
ONE = header({"a": ("F32", [1], 0, 4)}) + b"\0\0\0\0"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"pytorch_model.bin": b"\x80\x04."}, "pytorch_model.bin"),
        ({"pytorch_model-00001-of-00002.bin": b"", "pytorch_model.bin.index.json": b"{}"}, "00001-of-00002.bin"),
        ({"model.gguf": b"GGUF", "tf_model.h5": b""}, "model.gguf"),
        ({}, "no safetensors files"),
        ({"model.safetensors": ONE[:-1]}, "model.safetensors"),
        ({"model.safetensors": b"\xff" * 8 + b"{}"}, "model.safetensors"),
        ({"model.safetensors": header({"a": ("F32", [1 << 40], 0, 4 << 40)})}, "model.safetensors"),
        ({"model.safetensors": b""}, "model.safetensors"),
        ({"model.safetensors": header({"a.weight": ("I8", [4], 0, 4)}) + b"1234"}, "a.weight"),
        ({"model.safetensors": header({"a.qweight": ("U32", [1], 0, 4)}) + b"1234"}, "a.qweight"),
        ({INDEX: json.dumps({"weight_map": {"a": "one.safetensors"}}).encode()}, "one.safetensors"),
        ({INDEX: json.dumps({"weight_map": {"a": "../one.safetensors"}}).encode()}, "../one.safetensors"),
        ({INDEX: b"{}", "model.safetensors": ONE}, INDEX),
        ({INDEX: b"[", "model.safetensors": ONE}, INDEX),
    ],
)
def test_weights_that_cannot_be_read_are_named_before_anything_is_loaded(
    tmp_path: Path, files: dict[str, bytes], named: str
) -> None:
    for name, content in ({"config.json": b"{}", "tokenizer_config.json": b"{}"} | files).items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        check_files(str(tmp_path))
    assert named in str(caught.value)


@pytest.mark.parametrize("shape", [[5], [2, 3], [1, 1, 5]])
def test_a_tensor_of_more_numbers_than_the_bound_is_told_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: list[int]
) -> None:
    monkeypatch.setattr(directory_checks, "MOST_NUMBERS", 4)
    size = 4 * math.prod(shape)
    tensors = {"small": ("F32", [2, 2], 0, 16), "large": ("F32", shape, 16, 16 + size)}
    for name, content in {"config.json": b"{}", "tokenizer_config.json": b"{}"}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes(header(tensors) + bytes(16 + size))
    with pytest.raises(ConfigError, match="large has more than 4 numbers"):
        check_files(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(header({"small": ("F32", [2, 2], 0, 16)}) + bytes(16))
    check_files(str(tmp_path))


def test_whole_numbers_may_be_masks_or_what_a_quantizer_says(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(b"{}")
    (tmp_path / "config.json").write_bytes(b"{}")
    tensors = {"attn.bias": ("U8", [4], 0, 4)}
    (tmp_path / "model.safetensors").write_bytes(header(tensors) + b"1234")
    check_files(str(tmp_path))
    (tmp_path / "config.json").write_bytes(b'{"quantization_config": {"quant_method": "gptq"}}')
    tensors = {"a.qweight": ("U32", [1], 0, 4)}
    (tmp_path / "model.safetensors").write_bytes(header(tensors) + b"1234")
    check_files(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "extra.json", INDEX])
def test_a_file_of_gigabytes_is_not_read(tmp_path: Path, name: str) -> None:
    for one, content in {"config.json": b"{}", "tokenizer_config.json": b"{}", "model.safetensors": ONE}.items():
        (tmp_path / one).write_bytes(content)
    with (tmp_path / name).open("ab") as file:
        file.truncate(3 << 30)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        check_files(str(tmp_path))


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": -32}, "hidden_size"),
        ({"hidden_size": 32.5}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"intermediate_size": [64, 0]}, "intermediate_size"),
        ({"num_experts": -1}, "num_experts"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"hidden_size": 1 << 20, "num_hidden_layers": 1000}, "num_hidden_layers"),  # each is possible, both are not
    ],
)
def test_sizes_of_no_model_are_told_by_their_key(tmp_path: Path, sizes: dict[str, Any], key: str) -> None:
    for config in (sizes, {"text_config": sizes}):
        with pytest.raises(ConfigError, match=key):
            check_config_sizes(config, "config")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | sizes))
    with pytest.raises(ConfigError, match=key):  # whoever opens it
        load_config(ModelConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=key):
        load_config(ModelConfig(random=RandomModelConfig(architecture="qwen3", config=sizes, alphabet="ab")))


def test_sizes_that_a_model_may_have_pass() -> None:
    check_config_sizes(
        {"hidden_size": 7168, "num_hidden_layers": 61, "n_routed_experts": 256, "num_experts": 0}, "config"
    )
    check_config_sizes(
        {"n_embd": 768, "n_layer": 12, "n_inner": None, "head_dim": None, "intermediate_size": [64, 128]}, "x"
    )


TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<eos>"}]}


@pytest.mark.parametrize(
    ("changes", "rows", "named"),
    [
        ({}, 3, ()),
        ({}, 64, ()),  # an embedding is padded
        ({}, 2, ("2", "'<eos>'")),
        ({"added_tokens.json": {"<tool>": 5}}, 3, ()),  # tokenizer.json has all of them
        ({"tokenizer.json": {**TOKENIZER, "added_tokens": [{"id": 9, "content": "<gap>"}]}}, 8, ("8", "9", "'<gap>'")),
        ({"tokenizer.json": {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}}, 1, ("1", "'b'")),
        ({"tokenizer_config.json": {"pad_token": "[PAD]"}}, 3, ("3", "'[PAD]'")),
        ({"tokenizer_config.json": {"pad_token": {"content": "[PAD]"}}}, 4, ()),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"7": {"content": "<t>"}}}}, 7, ("7", "'<t>'")),
        ({"tokenizer_config.json": {"additional_special_tokens": ["<x>", "<y>"]}}, 4, ("4", "'<y>'")),
        ({"tokenizer.json": None, "vocab.json": {"a": 0}, "added_tokens.json": {"<t>": 3}}, 3, ("3", "'<t>'")),
        ({"config.json": {"vocab_size": 3, "eos_token_id": 3}}, 3, ("eos_token_id", "3")),
        ({"config.json": {"vocab_size": 3, "pad_token_id": 32000}}, 3, ("pad_token_id", "32000")),
        ({"generation_config.json": {"eos_token_id": [2, 7]}}, 3, ("generation_config.json", "7")),
        ({"generation_config.json": {"eos_token_id": "</s>"}}, 3, ("generation_config.json", "</s>")),
        ({"config.json": {"text_config": {"vocab_size": 2}}}, 0, ("2", "'<eos>'")),
    ],
)
def test_tokens_without_an_embedding_are_told_from_the_files(
    tmp_path: Path, changes: dict[str, Any], rows: int, named: tuple[str, ...]
) -> None:
    files = {"config.json": {"vocab_size": rows}, "tokenizer.json": TOKENIZER} | changes
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    if not named:
        check_named_tokens(str(tmp_path))
        return
    with pytest.raises(ConfigError) as caught:
        check_named_tokens(str(tmp_path))
    assert all(part in str(caught.value) for part in named)
