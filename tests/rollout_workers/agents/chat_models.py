"""Model directories with tokenizers and chat templates of the families that formats know, in small."""

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headway.learner.config import ModelConfig, RandomModelConfig
from headway.learner.models.pretrained import load_tokenizer
from headway.rollout_workers.agents.conversation import ChatFormat, Message, Tool
from headway.rollout_workers.agents.formats import open_format
from headway.rollout_workers.agents.formats.options import AgentFormatOptions

PLAIN = AgentFormatOptions(call_begin="[", call_end="]", input_begin="<", input_end=">", result_end=".")
LOOKUP: Tool = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
ASKED: Message = {"role": "user", "content": "what is it"}
ASKED_MORE: Message = {"role": "user", "content": "and what else"}
ANSWERED: Message = {"role": "assistant", "content": "it is this"}

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINKING = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = (
    "<|end_of_text|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
ALPHABET = "0123456789+-*=,#^[]<>abcdefghijklmnopqrstuvwxyz ."
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Qwen's and Llama's words: line breaks belong to what stands before."""
TEXTS = (
    'system\nYou call tools.\n\n<tools>\n{"type": "function", "function": {"name": "lookup", "description": ""}}\n',
    'user\nassistant\n<tool_call>\n{"name": "lookup", "arguments": {"word": "it", "exact": false}}\n</tool_call>\n\n',
    "<tool_response>\nthe answer is the question\n</tool_response> <think>\nhmm\n</think>\n\n ipython parameters true",
)

_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"
    "{{- '<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\n</tools><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}"
)
_RESPONSE = (
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
)
_CALLS = (
    "{%- for call in message.tool_calls %}{%- if content or not loop.first %}{{- '\n' }}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- ARGUMENTS }}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
)
_OPENING = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"

HERMES = (
    _TOOLS
    + "{%- for message in messages %}{%- set content = message.content %}"
    + "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    + "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    + "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' + content }}"
    + _CALLS.replace("ARGUMENTS", "call.function.arguments | tojson")
    + "{%- elif message.role == 'tool' %}"
    + _RESPONSE
    + "{%- endif %}{%- endfor %}"
    + _OPENING
)
"""As Qwen2.5's: arguments are an object that is written anew."""

THOUGHTFUL = (
    _TOOLS
    + "{%- set last = namespace(asked=0) %}{%- for message in messages %}"
    + "{%- if message.role == 'user' %}{%- set last.asked = loop.index0 %}{%- endif %}{%- endfor %}"
    + "{%- for message in messages %}{%- set content = message.content %}"
    + "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    + "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    + "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    + "{%- if loop.index0 > last.asked and message.reasoning_content %}"
    + "{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}{{- content }}"
    + _CALLS.replace(
        "ARGUMENTS",
        "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson",
    )
    + "{%- elif message.role == 'tool' %}"
    + _RESPONSE
    + "{%- endif %}{%- endfor %}"
    + _OPENING
)
"""As Qwen3's: the thoughts of earlier turns are left out, and arguments that are text stay as they are."""

OPENS_THOUGHT = THOUGHTFUL.replace("assistant\n' }}{%- endif %}", "assistant\n<think>\n' }}{%- endif %}")
"""As that of Qwen3's thinking models: the prompt begins the thought."""

NO_TOOLS = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are small.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As SmolLM2's: it has a system message of its own, and no tools."""

HEADERS = (
    "{{- bos_token }}{%- for message in messages %}{%- if message.tool_calls %}"
    "{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}"
    "{%- elif message.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{{- message.content | tojson }}{{- '<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{%- if loop.first and tools %}{%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}"
    "{%- endif %}"
    "{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
"""As Llama 3.2's: contents are trimmed, results are JSON, and a message has one call."""


class ChatModel(NamedTuple):
    """A tokenizer's added tokens, and its template."""

    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    template: str | None = None


MODELS = {
    "hermes": ChatModel(CHATML, ("<tool_call>", "</tool_call>"), HERMES),
    "thoughtful": ChatModel(CHATML, THINKING, THOUGHTFUL),
    "opens_thought": ChatModel(CHATML, THINKING, OPENS_THOUGHT),
    "no_tools": ChatModel(CHATML, (), NO_TOOLS),
    "bare_chatml": ChatModel(CHATML),
    "headers": ChatModel(LLAMA, (), HEADERS),
    "bare_llama": ChatModel(LLAMA),
}


def save_chat_model(directory: Path, model: ChatModel) -> tuple[int, ...]:
    """Write a tokenizer of bytes and their pairs, and return the tokens that end an answer."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if model.template is not NO_TOOLS:  # which is SmolLM2's, with GPT-2's words
        words = pre_tokenizers.Split(Regex(WORDS), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        TEXTS * 4, trainers.BpeTrainer(vocab_size=420, initial_alphabet=letters, show_progress=False)
    )
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in model.special])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in model.added])
    begins = {"bos_token": "<|begin_of_text|>"} if "<|begin_of_text|>" in model.special else {}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=model.special[0], pad_token=model.special[0], **begins
    )
    if model.template:
        wrapped.chat_template = model.template
    wrapped.save_pretrained(directory)
    ends = [text for text in ("<|im_end|>", "<|eot_id|>") if text in model.special]
    return tuple(int(wrapped.convert_tokens_to_ids(text)) for text in (model.special[0], *ends))


def save_character_model(directory: Path, alphabet: str = ALPHABET) -> tuple[int, ...]:
    """Write the tokenizer of a model of random weights, and return the token that ends an answer."""
    made = load_tokenizer(ModelConfig(random=RandomModelConfig(architecture="qwen3", alphabet=alphabet)))
    made.save_pretrained(directory)
    return (int(made.eos_token_id),)


class Opened(NamedTuple):
    """A format and the tokenizer of its model."""

    chat: ChatFormat
    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def decode(self, tokens: list[int] | None) -> str:
        assert tokens is not None
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))


def opened_in(directory: Path, kind: str) -> Opened:
    if kind == "plain":
        chat = open_format(directory, save_character_model(directory), options=PLAIN)
    elif kind == "renderers":
        ends = save_chat_model(directory, MODELS["thoughtful"])
        chat = open_format(directory, ends, "renderers", options=AgentFormatOptions(renderer="qwen3"))
    else:
        chat = open_format(directory, save_chat_model(directory, MODELS[kind]))
    return Opened(chat, AutoTokenizer.from_pretrained(directory))


def called(*arguments: str, name: str = "lookup") -> Message:
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": each}}
        for place, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def found(content: str, place: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{place}", "content": content}
