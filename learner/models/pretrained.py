"""The model that is trained, and its tokenizer."""

import difflib
import inspect
import re
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headway.broker.errors import ConfigError
from headway.learner.config import ModelConfig, RandomModelConfig

from .chat_template import read_chat_template
from .directory_checks import PARTS, check_config_sizes, check_path, check_tokens, no_tokenizer, read_config

if TYPE_CHECKING:
    from transformers import BatchEncoding, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

LONGEST_REASON = 300
PAD_TOKEN, EOS_TOKEN = "<pad>", "<eos>"


def load_model(model: ModelConfig, seed: int = 0) -> "PreTrainedModel":
    """Returns fp32 weights on the CPU: those of `model.path`, or random ones that `seed` determines."""
    from transformers import AutoModelForCausalLM

    config = load_config(model)
    with torch.random.fork_rng(devices=[]):
        if model.random is None:
            with reading(model.path), _without_padding(config):
                return AutoModelForCausalLM.from_pretrained(
                    model.path, config=config, dtype=torch.float32, use_safetensors=True
                )
        torch.manual_seed(seed)
        return built(config)


def built(config: "PretrainedConfig") -> "PreTrainedModel":
    """Returns the model with random fp32 weights, in which the embedding of every token is trained."""
    from transformers import AutoModelForCausalLM

    with building(config), _without_padding(config):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


@contextmanager
def _without_padding(config: "PretrainedConfig") -> Iterator[None]:
    """A context in which the configuration names no padding token. transformers lets the embedding of that token begin
    at 0 and have no gradient, and it often ends a turn, too. The padding of rows predicts nothing anyway."""
    named = {id(one): (one, getattr(one, "pad_token_id", None)) for one in (config, config.get_text_config())}
    for one, _ in named.values():
        one.pad_token_id = None
    try:
        yield
    finally:
        for one, token in named.values():
            one.pad_token_id = token


@contextmanager
def building(config: "PretrainedConfig") -> Iterator[None]:
    """Turns transformers' errors about impossible sizes into a ConfigError."""
    try:
        yield
    except (RuntimeError, ArithmeticError, ValueError, TypeError) as error:
        raise ConfigError(
            f"model.random.config, or the model's config.json: no {config.model_type} of these sizes can be built:"
            f" {_shortened(error)}."
        ) from error


def unfilled(config: "PretrainedConfig") -> "PreTrainedModel":
    """Returns the model that transformers would build, without memory for its weights."""
    from transformers import AutoModelForCausalLM

    with building(config), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def load_config(model: ModelConfig) -> "PretrainedConfig":
    """Returns transformers' configuration, with the class and the number format of what is trained."""
    from transformers import AutoModelForCausalLM

    _check_choice(model)
    config = _random_config(model.random) if model.random is not None else _path_config(model)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"model.path: {model.path} holds a {config.model_type}, which is no causal language model.")
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.dtype = model.dtype
    return config


def load_tokenizer(model: ModelConfig) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer of `model.path`, or for a random model one token a character, then pad and end of text;
    with `model.chat_template` in place of its own."""
    _check_choice(model)
    tokenizer = _character_tokenizer(model.random) if model.random is not None else _saved_tokenizer(model.path)
    if model.chat_template:
        tokenizer.chat_template = read_chat_template(model.chat_template)
    return tokenizer


def _saved_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    with reading(path):
        tokenizer = AutoTokenizer.from_pretrained(path)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes up an empty one
        raise ConfigError(no_tokenizer(path))
    check_tokens(tokenizer, path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode(
    tokenizer: "PreTrainedTokenizerBase", text: str, what: str = "the text", *, add_special_tokens: bool = True
) -> list[int]:
    """Returns the text's tokens. Raises ConfigError, naming `what`, if a random model's alphabet lacks a character."""
    return list(encoding(tokenizer, text, what, add_special_tokens=add_special_tokens).input_ids)


def encoding(
    tokenizer: "PreTrainedTokenizerBase", text: str, what: str, *, add_special_tokens: bool = True
) -> "BatchEncoding":
    """Returns the text's tokens as `encode` does, with the characters that each of them stands for."""
    if stranger := _outside_alphabet(tokenizer, text):
        raise ConfigError(
            f"{what} has the character {stranger!r}, which is not in model.random.alphabet: {text[:80]!r}."
            " Add it to the alphabet, or leave it out of the text."
        )
    return tokenizer(text, add_special_tokens=add_special_tokens)


def _check_choice(model: ModelConfig) -> None:
    if bool(model.path) == (model.random is not None):
        given = "both" if model.path else "neither"
        raise ConfigError(f"model: give either `path` or `random`; {given} of them is set.")
    check_path(model.path)
    if model.path and not Path(model.path).is_dir():
        _do_without_hub_if_away()


def _do_without_hub_if_away() -> None:
    """Switches to offline mode if the hub's name cannot be resolved: downloaded files are then used at once, and
    missing ones raise at once, without half a minute of retries."""
    from huggingface_hub import constants

    if urllib.request.getproxies():
        return  # which resolve it
    try:
        socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        constants.HF_HUB_OFFLINE = True


def _path_config(model: ModelConfig) -> "PretrainedConfig":
    from transformers import AutoConfig

    check_config_sizes(read_config(model.path) or {}, f"model.path: {Path(model.path, 'config.json')}")
    with reading(model.path):
        config: PretrainedConfig = AutoConfig.from_pretrained(model.path)
    return config


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns transformers' errors about a path into a ConfigError with the path and the remedy."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError, StrictDataclassError) as error:
        if Path(path).is_dir() and not any(Path(path).glob("*token*")) and "tokenizer" in str(error):
            raise ConfigError(no_tokenizer(path)) from error
        raise ConfigError(f"model.path: {path} cannot be loaded: {_shortened(error)} {_remedy(path)}") from error


def _remedy(path: str) -> str:
    if Path(path).is_dir():
        return PARTS
    return (
        f"There is no directory of that name in {Path.cwd()}, so it was taken for a hub id: check how it is spelled,"
        " and that the hub can be reached or the model was downloaded before."
    )


def _shortened(error: Exception) -> str:
    text = _one_line(error)
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


def _random_config(random: RandomModelConfig) -> "PretrainedConfig":
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    check_config_sizes(random.config, "model.random.config")
    _check_known("model.random.architecture", [random.architecture], CONFIG_MAPPING)
    _check_known("model.random.config", random.config, _known_options(AutoConfig.for_model(random.architecture)))
    tokenizer = _character_tokenizer(random)
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    try:
        config = AutoConfig.for_model(random.architecture, **(random.config | {"vocab_size": len(tokenizer)} | ids))
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"model.random.config: {random.architecture} refuses it: {_one_line(error)}") from error
    _check_vocabulary(random, len(tokenizer))
    return config


def _known_options(config: "PretrainedConfig") -> set[str]:
    """Returns fields, aliases, and other names that the model's source reads (Qwen3-MoE's `head_dim` is no field)."""
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"model.random.architecture: {config.model_type} is no causal language model.")
    module = sys.modules[AutoModelForCausalLM._model_mapping[type(config)].__module__]
    source = inspect.getsource(module)
    read = re.findall(r"config(?:\.|, \")(\w+)", source)
    return {*vars(config), *config.attribute_map, *read, "rope_theta", "rope_scaling"}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_known(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for an unknown name; transformers ignores these, so a slip would train another model."""
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(f"{where}: transformers knows no `{name}`; the nearest name is `{nearest[0]}`.")


def _check_vocabulary(random: RandomModelConfig, size: int) -> None:
    given: Any = random.config.get("vocab_size", size)
    if given != size:
        raise ConfigError(
            f"model.random.config.vocab_size is {given}, but {len(random.alphabet)} characters of the "
            f"alphabet with {PAD_TOKEN} and {EOS_TOKEN} make {size}. Leave vocab_size out."
        )


def _outside_alphabet(tokenizer: "PreTrainedTokenizerBase", text: str) -> str:
    """Returns the first character that a tokenizer of characters lacks; '' for other tokenizers, which encode any."""
    from tokenizers.models import WordLevel

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or tokenizer.unk_token is not None or not isinstance(backend.model, WordLevel):
        return ""
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    known = tokenizer.get_vocab()
    return next((character for character in text if character not in known), "")


def _character_tokenizer(random: RandomModelConfig) -> "PreTrainedTokenizerBase":
    """Returns a tokenizer without an unknown token, so that encoding a character outside the alphabet raises."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if len(set(random.alphabet)) != len(random.alphabet):
        raise ConfigError(f"model.random.alphabet names a character twice: {random.alphabet!r}.")
    tokens = [*random.alphabet, PAD_TOKEN, EOS_TOKEN]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
    )
