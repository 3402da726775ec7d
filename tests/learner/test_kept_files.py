"""A model's files reach workers, checkpoints and exports as they are, and all name the same end tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headway.broker.errors import ConfigError
from headway.learner.backends import open_backend
from headway.learner.config import ModelConfig
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.data.records import Conversation
from headway.learner.data.records.conversation_renderer import ConversationRenderer
from headway.learner.models.directory_checks import MOST_KEPT_BYTES, kept_paths
from headway.learner.models.end_tokens import EndTokens, end_tokens
from headway.learner.models.model_files import classifier_files, kept_files, model_files
from headway.learner.models.pretrained import load_model, load_tokenizer
from tests.learner.tiny import OPTIMIZER, model_config

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT_END, START, TURN_END = 256, 257, 258
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
GENERATION = {
    "eos_token_id": [TURN_END, TEXT_END],
    "temperature": 0.6,
    "top_k": 20,
    "do_sample": False,  # with a temperature transformers would refuse to write it
    "comment": "kept",
}
KEPT = {
    "generation_config.json": json.dumps(GENERATION),
    "preprocessor_config.json": '{"size":  3}',
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "vocab.txt": "one\r\ntwo\n",
    "README.md": "# Mine",
    "LICENSE": "as it is",
    "assets/picture.svg": "<svg/>",
}
LEFT = {
    "pytorch_model.bin": "pickle",
    "pytorch_model.bin.index.json": "{}",
    "adapter_config.json": "{}",
    "original/consolidated.00.pth": "weights",
    "original/params.json": "{}",
    "digests.json": "{}",
    ".git/HEAD": "main",
}


def tokenizer_of(eos: str = "<|endoftext|>", template: str | None = CHATML) -> PreTrainedTokenizerFast:
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(special, special=True) for special in SPECIALS])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, pad_token="<|endoftext|>")
    made.chat_template = template
    return made


def saved(directory: Path, files: dict[str, str] | None = None, **tokenizer: Any) -> ModelConfig:
    """Return a model of 259 tokens with these files beside its weights."""
    made = tokenizer_of(**tokenizer)
    config = model_config("qwen3")
    assert config.random is not None
    model = load_model(config)
    model.resize_token_embeddings(len(made))
    model.config.eos_token_id = made.eos_token_id
    model.save_pretrained(directory)
    made.save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    for name, content in (files or {}).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content, newline="")
    return ModelConfig(path=str(directory))


def names_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return saved(tmp_path_factory.mktemp("model"), KEPT | LEFT)


@pytest.fixture(scope="module")
def checkpoint(model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of a run that began with `model`."""
    directory = tmp_path_factory.mktemp("run") / "step_1"
    open_backend("fsdp", model, OPTIMIZER).save(directory)
    return directory


def test_a_checkpoint_has_every_file_of_the_model_byte_for_byte(model: ModelConfig, checkpoint: Path) -> None:
    own = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", *KEPT}
    state = {name for name in names_of(checkpoint) if name.startswith(("training_state/", "rng/"))}
    assert names_of(checkpoint) - state == own | {"model.safetensors"}
    for name in own:
        assert (checkpoint / name).read_bytes() == Path(model.path, name).read_bytes(), name


def test_the_checkpoint_of_a_checkpoint_has_them_too(model: ModelConfig, checkpoint: Path) -> None:
    again = kept_files(ModelConfig(path=str(checkpoint)))
    assert again == kept_files(model)
    assert set(again) == {
        *("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *KEPT,
    }


def test_workers_get_what_configures_and_tokenizes(model: ModelConfig) -> None:
    files = model_files(model)
    assert set(KEPT) - set(files.files) == {"LICENSE", "assets/picture.svg"}
    assert all(files.files[name] == content.encode() for name, content in KEPT.items() if name in files.files)
    assert files.end_tokens == (TEXT_END, TURN_END)


def test_only_the_number_format_changes_in_the_configuration(model: ModelConfig, tmp_path: Path) -> None:
    before = json.loads(Path(model.path, "config.json").read_bytes())
    after = json.loads(kept_files(model, dtype="bfloat16")["config.json"])
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"dtype"}
    assert after["dtype"] == "bfloat16"
    quantized = shutil.copytree(model.path, tmp_path / "quantized")
    stored = before | {"torch_dtype": before.pop("dtype"), "quantization_config": {"quant_method": "fp8"}}
    (quantized / "config.json").write_text(json.dumps({name: stored[name] for name in stored if name != "dtype"}))
    of_quantized = ModelConfig(path=str(quantized))
    trained, sent = json.loads(kept_files(of_quantized)["config.json"]), model_files(of_quantized).files["config.json"]
    assert ("dtype" in trained, trained["torch_dtype"]) == (False, "float32")
    assert "quantization_config" not in trained
    assert json.loads(sent)["quantization_config"] == {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("generation", "eos", "template", "expected"),
    [
        ([TURN_END, TEXT_END], "<|endoftext|>", CHATML, EndTokens((TEXT_END, TURN_END), TEXT_END, TURN_END)),
        (None, "<|endoftext|>", CHATML, EndTokens((TEXT_END, TURN_END), TEXT_END, TURN_END)),
        (None, "<|im_end|>", CHATML, EndTokens((TURN_END,), TURN_END, TURN_END)),
        ([65], "<|endoftext|>", None, EndTokens((65, TEXT_END), TEXT_END, TEXT_END)),
        (65, "<|endoftext|>", CHATML, EndTokens((65, TEXT_END, TURN_END), TEXT_END, TURN_END)),
        (None, "<|endoftext|>", CHATML.replace("<|im_end|>", "###"), EndTokens((TEXT_END,), TEXT_END, TEXT_END)),
        (None, "<|endoftext|>", CHATML.replace("<|im_end|>", " <|im_end|>"), None),
        (None, "<|endoftext|>", CHATML.replace("m['content']", "m['content'][0]['text']"), None),
        (None, "<|endoftext|>", "{{ raise_exception('no') }}", EndTokens((TEXT_END,), TEXT_END, TEXT_END)),
    ],
)
def test_end_tokens_are_those_of_files_tokenizer_and_template(
    tmp_path: Path, generation: Any, eos: str, template: str | None, expected: EndTokens | None
) -> None:
    files = {} if generation is None else {"generation_config.json": json.dumps({"eos_token_id": generation})}
    model = saved(tmp_path, files, eos=eos, template=template)
    found = end_tokens(load_tokenizer(model))
    assert found == (expected or EndTokens((TEXT_END, TURN_END), TEXT_END, TURN_END))
    kept = kept_files(model)
    named = json.loads(kept.get("generation_config.json", kept["config.json"]))["eos_token_id"]
    assert {*found.any} == {*(named if isinstance(named, list) else [named])}, "servers look there"
    assert model_files(model).end_tokens == found.any


def test_a_model_without_any_end_token_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(template=None)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no response could ever end"):
        end_tokens(tokenizer)


@pytest.mark.parametrize("system_prompt", ["", "Be brief."])
def test_training_ends_where_workers_stop(model: ModelConfig, system_prompt: str) -> None:
    tokenizer = load_tokenizer(model)
    renderer = ConversationRenderer(tokenizer, Renderer(tokenizer, system_prompt))
    messages = [{"role": "user", "content": "1"}], [{"role": "assistant", "content": "2"}]
    turn = renderer.render(Conversation(prompt=messages[0], completion=messages[1]))
    text = renderer.render(Conversation(prompt="1", completion="2"))
    assert turn is not None
    assert text is not None
    assert list(turn.token_ids[turn.loss_mask > 0]) == [ord("2") - 33, TURN_END], "the line break behind it is none"
    assert list(text.token_ids[text.loss_mask > 0]) == [ord("2") - 33, TURN_END if system_prompt else TEXT_END]


def test_a_classifier_pads_with_no_end_token(model: ModelConfig, tmp_path: Path) -> None:
    files = classifier_files(model)
    config = json.loads(files["config.json"])
    assert (config["architectures"], config["pad_token_id"]) == (["Qwen3ForSequenceClassification"], START)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token_id == START
    assert {name: files[name] for name in KEPT} == {name: content.encode() for name, content in KEPT.items()}


def test_a_chat_template_of_the_recipe_takes_the_place_of_all_others(model: ModelConfig, tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(CHATML.replace("<|im_end|>", "<|im_start|>"))
    given = ModelConfig(path=model.path, chat_template=str(path))
    files = kept_files(given)
    assert files["chat_template.jinja"] == path.read_bytes()
    assert "additional_chat_templates/tool_use.jinja" not in files
    assert {*json.loads(files["generation_config.json"])["eos_token_id"]} == {TEXT_END, START, TURN_END}
    assert json.loads(files["generation_config.json"])["top_k"] == GENERATION["top_k"]


def test_more_than_a_model_can_have_is_refused_before_it_is_read(model: ModelConfig, tmp_path: Path) -> None:
    with (tmp_path / "events.log").open("wb") as file:
        file.truncate(MOST_KEPT_BYTES + 1)
    with pytest.raises(ConfigError, match=r"events\.log"):
        kept_paths(tmp_path)
