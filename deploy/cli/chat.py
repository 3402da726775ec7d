"""The terminal of `headway chat`: a line is a message, and the answer is printed as it is generated."""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headway.broker.errors import ConfigError
from headway.deploy.printing import complain, say, say_json

if TYPE_CHECKING:
    from headway.deploy.roles.chat import Chat, Reply

PROMPT = "> "


def converse(
    model: str,
    step: int | str | None,
    overrides: Sequence[str],
    *,
    system: str | None,
    temperature: float | None,
    as_json: bool,
) -> None:
    """Talk with the model that is meant (`find_trained`), until the input ends."""
    from transformers.utils.logging import disable_progress_bar

    from headway.deploy.roles.chat import Chat
    from headway.deploy.roles.trained_model import find_trained, generation_settings

    disable_progress_bar()
    found = find_trained(model, step)
    if system is None:
        system = "" if found.recipe is None else found.recipe.prompts.system_prompt
    with Chat(found, generation_settings(found, overrides, temperature), system) as opened:
        if not opened.has_template:
            complain("The model has no chat template: it continues each line, and remembers none.")
        if sys.stdin.isatty():
            complain(f"{found.path} listens. Ctrl-C stops an answer, Ctrl-D leaves.")
        for message in _messages():
            _answer(opened, message, as_json)


def _answer(chat: "Chat", message: str, as_json: bool) -> None:
    """Print the answer to a message, or why there is none."""
    try:
        reply = chat.say(message) if as_json else chat.say(message, lambda text: say(text, ends_line=False))
    except ConfigError as error:
        complain(f"{error}")
        return
    if reply.finish_reason == "interrupted" and not sys.stdin.isatty():
        raise KeyboardInterrupt  # nobody is there who would go on
    if as_json:
        say_json(reply, in_one_line=True)
        return
    say(" [stopped]" if reply.finish_reason == "interrupted" else _cut(reply))
    if reply.forgotten:
        complain(f"The {reply.forgotten} oldest messages are forgotten: the model has no room for more.")


def _cut(reply: "Reply") -> str:
    return " [cut at its longest length]" if reply.finish_reason == "length" else ""


def _messages() -> Iterator[str]:
    """Yield the lines of the input that are not empty. At a terminal, Ctrl-C begins a new line."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401 - it lets `input` edit its line
    while True:
        try:
            line = input(PROMPT) if is_terminal else sys.stdin.readline()
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            say("")
            continue
        except EOFError:
            say("")
            return
        if not is_terminal and not line:
            return
        if line.strip():
            yield line.strip()
