"""Fields of a request: which ones a dialect reads, which are harmless, and which would change how the model samples."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from headway.rollout_workers.agents.calls import CallRefusedError

SAMPLING = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "length_penalty",
    }
)
"""Fields that an endpoint with `ignore_sampling` ignores."""

NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "stop_sequences": ([],),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "background": (False,),
}
"""Fields that change what is answered, with the values that ask for nothing; others cannot be honoured."""


class Fields(msgspec.Struct, frozen=True, kw_only=True):
    """What a dialect does with the fields of its requests."""

    read: frozenset[str]
    harmless: frozenset[str]
    """Accepted, whatever they say: they do not change what the model samples."""
    no_effect: frozenset[str]
    """Those of NO_EFFECT that the dialect knows."""
    refused: Mapping[str, str] = {}
    """Others that the dialect knows, with what to do instead."""

    def check(self, body: Mapping[str, Any], *, ignores_sampling: bool, path: str = "") -> dict[str, Any]:
        """Return the fields that are read. A field that is null counts as absent.

        Raises CallRefusedError for a field that is unknown, or asks for what cannot be honoured.
        """
        found = dict[str, Any]()
        for name, value in body.items():
            if value is None or name in self.harmless or (ignores_sampling and name in SAMPLING):
                continue
            if name in self.read:
                found[name] = value
            elif name in self.no_effect:
                if value not in NO_EFFECT[name]:
                    usual = " or ".join(map(repr, NO_EFFECT[name]))
                    raise refusal(f"{path}{name}", f"anything but {usual} cannot be honoured here")
            elif name in self.refused:
                raise refusal(f"{path}{name}", self.refused[name])
            else:
                raise refusal(f"{path}{name}"[:100], "this endpoint does not know the field, so leave it away")
        return found


def names(line: str) -> frozenset[str]:
    """Return the names that a text has, with spaces between them."""
    return frozenset(line.split())


def refusal(field: str, reason: str) -> CallRefusedError:
    """Return the error for a field that cannot be honoured."""
    return CallRefusedError(f"'{field}' is not supported: {reason}", field)


def number(body: Mapping[str, Any], name: str) -> float | None:
    """Return a field that is a number, or None where it is absent."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CallRefusedError(f"'{name}' must be a number", name)
    return value


def whole_number(body: Mapping[str, Any], name: str, least: int | None = None) -> int | None:
    """Return a field that is an integer, or None where it is absent."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        raise CallRefusedError(f"'{name}' must be an integer" + ("" if least is None else f" from {least} on"), name)
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Return a field that is true or false; absent, it is false."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise CallRefusedError(f"'{name}' must be true or false", name)
    return value


def text(value: Any, where: str) -> str:
    """Return a value that must be text."""
    if not isinstance(value, str):
        raise CallRefusedError(f"'{where}' must be text", where)
    return value


def name_of(value: Any, where: str) -> str:
    """Return a value that must be a name: text that is not empty."""
    name = text(value, where)
    if not name:
        raise CallRefusedError(f"'{where}' is empty", where)
    return name


def items(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a value that must be a list of objects."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise CallRefusedError(f"'{where}' must be a list of objects", where)
    return value


def mapping(value: Any, where: str) -> dict[str, Any]:
    """Return a value that must be an object."""
    if not isinstance(value, dict):
        raise CallRefusedError(f"'{where}' must be an object", where)
    return value


def content_text(value: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return a content, which is text or a list of parts that are text; parts are joined with a newline."""
    if isinstance(value, str):
        return value
    return "\n".join(part_text(part, f"{where}[{i}]", kinds) for i, part in enumerate(items(value, where)))


def part_text(part: Mapping[str, Any], where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the text of a part of a content."""
    if part.get("type") not in kinds:
        raise refusal(where, f"the model reads text alone, and not parts of type {str(part.get('type'))[:40]!r}")
    return text(part.get("text"), f"{where}.text")


def sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ChatCall that say what sampling the client asks for."""
    return {
        "temperature": number(body, "temperature"),
        "top_p": number(body, "top_p"),
        "top_k": whole_number(body, "top_k"),
        "seed": whole_number(body, "seed"),
    }


def check_tool_choice(choice: Any, offered: str = "auto") -> bool:
    """Return whether the model is shown the tools. Raises CallRefusedError for a choice that forces a call."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind is None or kind == offered:
        return True
    if kind == "none":
        return False
    raise refusal("tool_choice", f"a call of a tool cannot be forced; ask with {offered!r} or 'none'")


def function_tool(given: Mapping[str, Any], where: str, parameters: str = "parameters") -> dict[str, Any]:
    """Return a tool as sessions take it. `parameters` is what the dialect calls the schema."""
    function: dict[str, Any] = {"name": name_of(given.get("name"), f"{where}.name")}
    if given.get("description") is not None:
        function["description"] = text(given["description"], f"{where}.description")
    if given.get(parameters) is not None:
        function["parameters"] = mapping(given[parameters], f"{where}.{parameters}")
    return {"type": "function", "function": function}


def function_call(call_id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """Return a call of a tool as it stands in an assistant's message."""
    function = {"name": text(name, f"{where}.name"), "arguments": text(arguments, f"{where}.arguments")}
    return {"id": name_of(call_id, f"{where}.id"), "type": "function", "function": function}
