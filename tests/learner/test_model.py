import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, CLIPConfig

from headway.broker.errors import ConfigError
from headway.learner.config import ModelConfig, RandomModelConfig
from headway.learner.models.model_files import model_files
from headway.learner.models.pretrained import encode, load_config, load_model, load_tokenizer
from tests.learner.tiny import ALPHABET, model_config


def random_model(**changes: Any) -> ModelConfig:
    given: dict[str, Any] = {"architecture": "qwen3", "alphabet": ALPHABET} | changes
    return ModelConfig(random=RandomModelConfig(**given))


def test_seed_decides_the_weights_and_nothing_else_changes() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (load_model(model_config("qwen3_moe"), seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert {tensor.dtype for tensor in first.values()} == {torch.float32}


def test_tokenizer_is_one_token_a_character_and_survives_its_files(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(random_model(alphabet=ALPHABET + " \n"))
    tokenizer.save_pretrained(tmp_path)
    for reader in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        text = "^4*5 =\n7#"
        ids = reader(text).input_ids
        assert ids == [(ALPHABET + " \n").index(character) for character in text]
        assert reader.decode(ids) == text
        assert reader.decode([*ids, reader.eos_token_id], skip_special_tokens=True) == text
        assert (reader.pad_token_id, reader.eos_token_id, reader.bos_token_id) == (19, 20, None)


def test_a_character_outside_the_alphabet_is_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(random_model())
    tokenizer.save_pretrained(tmp_path)
    for reader in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert encode(reader, "4*5<eos>", "it") == [4, 12, 5, 18]
        with pytest.raises(ConfigError, match=r"^prompt 7 has the character 'x', .* model\.random\.alphabet: '4x5'"):
            encode(reader, "4x5", "prompt 7")


def test_config_knows_the_tokenizer() -> None:
    config = load_model(model_config("qwen3")).config
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id) == (19, 17, 18)
    assert config.bos_token_id is None


def test_files_build_the_same_model_elsewhere(tmp_path: Path) -> None:
    given = model_config("qwen3_moe")
    files = model_files(given).files
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    config = AutoConfig.from_pretrained(tmp_path)
    expected, got = load_config(given).to_dict(), config.to_dict()
    assert {**got, "_name_or_path": ""} == expected
    assert (got["architectures"], got["dtype"]) == (["Qwen3MoeForCausalLM"], "float32")
    assert AutoTokenizer.from_pretrained(tmp_path)("4*5").input_ids == [4, 12, 5]
    assert "generation_config.json" in files


def test_path_model_keeps_weights(tmp_path: Path) -> None:
    model = load_model(model_config("qwen3"), 4)
    model.save_pretrained(tmp_path)
    load_tokenizer(model_config("qwen3")).save_pretrained(tmp_path)
    loaded = load_model(ModelConfig(path=str(tmp_path), dtype="bfloat16"))
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert load_tokenizer(ModelConfig(path=str(tmp_path)))("4").input_ids == [4]


def saved_model(directory: Path) -> Path:
    load_model(model_config("qwen3")).save_pretrained(directory)
    load_tokenizer(model_config("qwen3")).save_pretrained(directory)
    return directory


def without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def with_torn_weights(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"torn")


def with_torn_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def with_no_model_type(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def with_another_kind(directory: Path) -> None:
    CLIPConfig().save_pretrained(directory)


def without_tokenizer(directory: Path) -> None:
    for path in directory.glob("*token*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_weights, "no file named model.safetensors"),
        (with_torn_weights, "header"),
        (with_torn_config, "not a valid JSON file"),
        (with_no_model_type, "model_type"),
        (with_another_kind, "holds a clip, which is no causal language model"),
        (without_tokenizer, r"has no tokenizer: its files \(tokenizer.json, tokenizer_config.json\) are missing"),
    ],
)
def test_a_broken_model_is_named(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    damage(saved_model(tmp_path))
    load = load_tokenizer if damage is without_tokenizer else load_model
    with pytest.raises(ConfigError, match=message) as caught:
        load(ModelConfig(path=str(tmp_path)))
    assert str(caught.value).startswith(f"model.path: {tmp_path} ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["missing", "no such:id", "nobody/nothing"])
def test_a_hub_id_that_is_none_names_the_remedy(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (load_model, load_tokenizer):
        with pytest.raises(ConfigError, match=f"model.path: {path} cannot be loaded: .* hub id"):
            load(ModelConfig(path=path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(), "neither of them"),
        (ModelConfig(path="x", random=random_model().random), "both of them"),
        (ModelConfig(path="./missing"), "no directory ./missing"),
        (ModelConfig(path=__file__), "is a file. Give the directory"),
        (random_model(architecture="qwen3_mo"), "nearest name is `qwen3_moe`"),
        (random_model(architecture="clip"), "no causal language model"),
        (random_model(config={"hiden_size": 64}), "nearest name is `hidden_size`"),
        (random_model(config={"hidden_size": "wide"}), "hidden_size is wide; expected an integer"),
        (random_model(config={"vocab_size": 100}), "make 19"),
        (random_model(alphabet="abca"), "twice"),
    ],
)
def test_errors_name_the_remedy(config: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(config)


def test_a_hub_whose_name_cannot_be_resolved_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    asked = list[str]()

    def refuse(host: str, *_: object, **__: object) -> None:
        asked.append(host)
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match=r"nobody/nothing cannot be loaded: .* check how it is spelled"):
        load_config(ModelConfig(path="nobody/nothing"))
    assert len(asked) <= 2
