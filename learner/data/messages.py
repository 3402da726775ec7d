"""Messages of any dialect (OpenAI's role and content, ShareGPT's from and value) become those of chat templates.

Each function may be given its own result, which it returns as it is.
"""

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from headway.broker.errors import ConfigError

Message = dict[str, Any]
"""`{"role": ..., "content": ...}`, as chat templates take it."""
Content = str | list[Message]
"""A text that is tokenized as it is, or messages that the model's chat template renders."""
SHOWN = 80


class TemplateInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a chat template besides messages, as a prompt or a record states them."""

    tools: list[dict[str, Any]] = []
    """Descriptions of functions, as chat templates take them."""
    chat_template_kwargs: dict[str, Any] = {}
    """Values of further names that the template reads, such as `enable_thinking`."""

    @property
    def columns(self) -> list[str]:
        """The columns of a row that said any of it."""
        return [name for name in TemplateInputs.__struct_fields__ if getattr(self, name)]


NOTHING = TemplateInputs()
"""No tools, and no further names."""


class RowError(ConfigError):
    """A row is no record and no prompt. The message names the place, the fault and the remedy."""

    def __init__(self, place: str, reason: str, fault: str, remedy: str) -> None:
        """`reason` is the fault without values of the row, by which skipped rows are counted."""
        super().__init__(f"{place}: {fault}. {remedy}")
        self.reason = reason


def shown(value: Any) -> str:
    """Returns a value's text, cut short, since a row may hold a book."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def check_sendable(value: msgspec.Struct, what: str) -> None:
    """Raises ConfigError, naming `what`, if the struct holds a value of another type."""
    try:
        msgspec.msgpack.encode(value)
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ConfigError(
            f"{what}: it holds {half!r}, half of a character. Write the whole character, or leave it out."
        ) from error
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{what}: it holds what cannot be sent ({error}). Expected text, numbers of at most 64 bits, lists and"
            " mappings with names; write others as text."
        ) from error


ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "function_call",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
}
"""The words of files -> roles of chat templates; `function_call` becomes an assistant's message with a call."""
OPENING = ("system", "developer")


class Tags(msgspec.Struct, frozen=True, kw_only=True):
    """The names that messages of a file have for their parts and roles, as LLaMA-Factory's `tags`. Empty: the usual."""

    role_tag: str = ""
    content_tag: str = ""
    user_tag: str = ""
    assistant_tag: str = ""
    observation_tag: str = ""
    function_tag: str = ""
    system_tag: str = ""

    def roles(self) -> Mapping[str, str]:
        """Returns what each role of the file means."""
        own = {
            self.user_tag: "user",
            self.assistant_tag: "assistant",
            self.observation_tag: "tool",
            self.function_tag: "function_call",
            self.system_tag: "system",
        }
        return ROLES | {name: role for name, role in own.items() if name}


def read_content(value: Any, place: str, column: str, tags: Tags) -> Content:
    """Returns a column that is a text, or messages. A text of JSON or Python that states messages is these. Raises
    RowError."""
    stated = _stated_messages(value, tags) if isinstance(value, str) else value
    return value if stated is None and isinstance(value, str) else to_messages(stated, place, column, tags)


def read_prompt(value: Any, place: str, column: str, tags: Tags) -> Content:
    """Returns a prompt: a text, or messages that a model answers, or goes on with where an assistant's turn is the last
    one. Raises RowError."""
    content = read_content(value, place, column, tags)
    if isinstance(content, list):
        check_turns(content, place)
        if is_begun(content) and "tool_calls" in content[-1]:
            raise RowError(
                place,
                "that end with a call of a function",
                f"the last message of {column!r} is an assistant's, with a call of a function",
                "A model cannot go on behind it: add what the tool returned, or leave the message out.",
            )
    return content


def is_begun(content: Content) -> bool:
    """Returns whether a prompt ends with an assistant's message, with which the model goes on."""
    return isinstance(content, list) and content[-1].get("role") == "assistant"


def to_messages(value: Any, place: str, column: str, tags: Tags) -> list[Message]:
    """Returns a column's messages. Raises RowError."""
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list) or not value:
        raise RowError(
            place,
            f"whose {column!r} is no list of messages",
            f"{column!r} is {shown(value)}",
            'Expected a text, or a list of messages, such as [{"role": "user", "content": "..."}].',
        )
    return [_message(each, f"{column}[{number}]", place, tags) for number, each in enumerate(value)]


def _stated_messages(text: str, tags: Tags) -> list[Any] | None:
    """Returns the messages that a text states, such as one that `str` or `json.dumps` wrote, however often."""
    if not text.lstrip().startswith(("[", "{", '"', "'")) or not any(
        name in text for name in ("role", "from", tags.role_tag or "role")
    ):
        return None
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            stated = read(text.strip())
            if isinstance(stated, str):
                return _stated_messages(stated, tags)
            listed = stated if isinstance(stated, list) else [stated]
            return listed if listed and all(_is_message(each, tags) for each in listed) else None
    return None


def _is_message(value: Any, tags: Tags) -> bool:
    role, content = _keys(value, tags)
    return isinstance(value, dict) and isinstance(value.get(role), str) and bool({content, "tool_calls"} & value.keys())


def _message(value: Any, what: str, place: str, tags: Tags) -> Message:
    value = {name: part for name, part in value.items() if part is not None} if isinstance(value, Mapping) else value
    role_key, content_key = _keys(value, tags)
    if not isinstance(value, dict) or not isinstance(value.get(role_key), str):
        raise RowError(
            place,
            "with a message without a role",
            f"{what} is {shown(value)}",
            "Expected `role` and `content`, or `from` and `value`; name others in options.tags.",
        )
    role = tags.roles().get(value[role_key])
    if role is None:
        raise RowError(
            place,
            "with an unknown role",
            f"{what} has the role {shown(value[role_key])}",
            f"Known: {', '.join(ROLES)}; name others in options.tags, such as {{user_tag: ...}}.",
        )
    # Further keys are for the templates that read them.
    rest = {name: part for name, part in value.items() if name not in (role_key, content_key, *_READ)}
    message: Message = {name: part for name, part in rest.items() if part not in ("", [], {})}
    message |= {"role": role, "content": value.get(content_key, "")}
    _unfold_parts(message, what, place)
    if role == "function_call":
        message |= {"role": "assistant", "content": "", "tool_calls": message["content"]}
    if stated := message.get("tool_calls") or value.get("function_call"):
        message["tool_calls"] = _calls(stated, what, place)
    if not message["content"] and "tool_calls" not in message and role not in _MAY_BE_EMPTY:
        reason = "with an empty response" if message["role"] == "assistant" else "with an empty message"
        raise RowError(place, reason, f"{what}, of the {role}, is empty", "Write its text, or leave the record out.")
    return message if _is_trained(value, what, place) else message | {"trained": False}


_READ = ("weight", "loss_weight", "function_call")
"""The keys of a message that are no part of the text, or become another one."""
_MAY_BE_EMPTY = (*OPENING, "tool")
"""The roles that may say nothing: a template has no words of its own then, and a tool may return none."""


def _keys(value: Any, tags: Tags) -> tuple[str, str]:
    names = ("from", "value") if isinstance(value, Mapping) and "from" in value else ("role", "content")
    return tags.role_tag or names[0], tags.content_tag or names[1]


def _unfold_parts(message: Message, what: str, place: str) -> None:
    """Makes a text of a content that is a list of parts."""
    content = message["content"]
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not all(isinstance(part, Mapping) and "type" in part for part in content):
        raise RowError(
            place, "with a content that is no text", f"{what} has the content {shown(content)}", "Write it as text."
        )
    texts = [_part_text(part, what, place) for part in content]
    message["content"] = "".join(text for kind, text in texts if kind == "text")
    if thought := "".join(text for kind, text in texts if kind == "reasoning"):
        message["reasoning_content"] = thought
    if calls := [call for kind, text in texts if kind == "tool_call" for call in _calls(text, what, place)]:
        message["tool_calls"] = calls


def _part_text(part: Mapping[str, Any], what: str, place: str) -> tuple[str, str]:
    kind, text = part["type"], part.get("text") or part.get("value") or ""
    if kind not in ("text", "reasoning", "tool_call"):
        raise RowError(
            place,
            "with other than text",
            f"{what} has a part of type {shown(kind)}",
            "Headway trains on text alone; leave the record out.",
        )
    if not isinstance(text, str):
        raise RowError(place, "with a content that is no text", f"{what} has the part {shown(part)}", "Write text.")
    return kind, text


def _calls(stated: Any, what: str, place: str) -> list[dict[str, Any]]:
    """Returns calls of functions, which are stated as mappings or as a text of JSON: one, or a list of them."""
    stated = _of_json(stated)
    calls = [_of_json(call) for call in (stated if isinstance(stated, list) else [stated])]
    functions = [call.get("function", call) if isinstance(call, Mapping) else None for call in calls]
    if not calls or not all(isinstance(each, Mapping) and isinstance(each.get("name"), str) for each in functions):
        raise RowError(
            place,
            "with a call of a function that is no JSON",
            f"{what} is {shown(stated)}",
            'Expected {"name": "...", "arguments": {...}}.',
        )
    return [_call(call, what, place) for call in calls]


def _call(call: Mapping[str, Any], what: str, place: str) -> dict[str, Any]:
    """Returns a call as templates take it, with a mapping of arguments; OpenAI states them as a text of JSON."""
    is_wrapped = "function" in call
    function = dict(call["function"] if is_wrapped else call)
    around = dict(call) if is_wrapped else {name: function.pop(name) for name in ("id", "type") if name in function}
    stated = function.get("arguments")
    arguments = _of_json(stated or {})
    if not isinstance(arguments, Mapping):
        raise RowError(
            place,
            "with arguments of a call that are no JSON object",
            f"{what} calls {function['name']!r} with the arguments {shown(stated)}",
            'Write them as a mapping, or as its text in JSON, such as {"city": "Oslo"}.',
        )
    return {"type": "function", **around, "function": function | {"arguments": dict(arguments)}}


def _of_json(value: Any) -> Any:
    """Returns what a text of JSON states, however often it was encoded; any other value as it is."""
    with suppress(ValueError, RecursionError):
        while isinstance(value, str):
            value = json.loads(value)
    return value


def _is_trained(value: Mapping[str, Any], what: str, place: str) -> bool:
    """Returns what `weight` (OpenAI) or `loss_weight` (LLaMA-Factory) of a message says: 0 is context alone."""
    weight = value.get("weight", value.get("loss_weight", 1))
    if weight not in (0, 1):
        raise RowError(
            place,
            "with a weight that is neither 0 nor 1",
            f"{what} has the weight {shown(weight)}",
            "A turn is trained (1) or not (0).",
        )
    return bool(weight)


def check_turns(messages: list[Message], place: str, *, ends_with: str = "") -> None:
    """Raises RowError where roles are out of order, or where the last one is not `ends_with`: an `assistant`'s turn, or
    `prompt`, what an assistant answers. Empty: either."""
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles and roles[0] in OPENING else roles
    for before, role in zip(["system", *turns], turns, strict=False):
        if role in OPENING or role == before != "tool" or (role, before) in _OUT_OF_ORDER:
            raise RowError(
                place,
                "with roles out of order",
                f"the roles are {shown(roles)}, where {role!r} follows {before!r}",
                "After an optional system message, user (or tool) and assistant take turns; merge what one of them said"
                " in two messages.",
            )
    is_answered = bool(turns) and turns[-1] == "assistant"
    if not turns or (ends_with and is_answered != (ends_with == "assistant")):
        wanted = "an assistant's" if ends_with == "assistant" else "a user's"
        raise RowError(
            place,
            f"that do not end with {wanted} turn",
            f"the roles are {shown(roles)}, and the last one must be {wanted}",
            "Leave out what comes after it, or the record.",
        )


_OUT_OF_ORDER = {("assistant", "system"), ("tool", "system"), ("tool", "user")}


def under_system(content: Content, stated: Any, place: str) -> Content:
    """Returns a prompt that begins with the message of the column `system`, which makes a text a conversation. Raises
    RowError where that states no text, or another one than a system message that is there."""
    if stated in (None, ""):
        return content
    (message,) = to_messages([{"role": "system", "content": stated}], place, "system", Tags())
    if not content:
        raise RowError(
            place,
            "whose 'system' stands before no prompt",
            f"'system' is {shown(stated)}, and the row has a text alone, which is no conversation",
            "Leave the column out, give it another name, or split the text into a prompt and a completion.",
        )
    if isinstance(content, str):
        return [message, {"role": "user", "content": content}]
    if content[0]["role"] not in OPENING:
        return [message, *content]
    if content[0]["content"] != message["content"]:
        raise RowError(
            place,
            "with two system messages",
            f"'system' is {shown(stated)}, and the first message is {shown(content[0]['content'])}",
            "Leave one of them out.",
        )
    return content


def to_kwargs(value: Any, place: str) -> dict[str, Any]:
    """Returns what `chat_template_kwargs` gives the names of a chat template: a mapping, or its text in JSON. Raises
    RowError."""
    stated = _of_json(value) if value else {}
    if not isinstance(stated, Mapping) or not all(isinstance(name, str) for name in stated):
        raise RowError(
            place,
            "whose 'chat_template_kwargs' are no mapping",
            f"'chat_template_kwargs' is {shown(value)}",
            'Expected names and values, such as {"enable_thinking": false}.',
        )
    return dict(stated)


def to_tools(value: Any, place: str) -> list[dict[str, Any]]:
    """Returns the descriptions of functions in `tools`, as chat templates take them: a list, or one, in which a text is
    read as JSON. Raises RowError."""
    stated = _of_json(value) if value else []
    tools = [_of_json(tool) for tool in (stated if isinstance(stated, list) else [stated])]
    functions = [_of_json(tool.get("function", tool)) if isinstance(tool, dict) else None for tool in tools]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise RowError(
            place,
            "whose 'tools' are no list of functions",
            f"'tools' is {shown(value)}",
            "Expected a list of descriptions, each with a name; give a column of another meaning another name.",
        )
    return [_tool(tool, function) for tool, function in zip(tools, functions, strict=True)]


def _tool(tool: dict[str, Any], function: Any) -> dict[str, Any]:
    around = tool if "function" in tool else {}
    described = {name: part for name, part in function.items() if around or (name, part) != ("type", "function")}
    if isinstance(described.get("parameters"), str):
        described["parameters"] = _of_json(described["parameters"])
    return {"type": "function", **around, "function": described}
