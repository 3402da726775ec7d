"""A chat template of the user's own, in place of the one that the model's tokenizer has."""

from pathlib import Path

from broker.errors import ConfigError

WHERE = "model.chat_template"


def read_chat_template(path: str) -> str:
    """Returns the Jinja template in a file. Raises ConfigError for a file that cannot be read, or parsed."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{WHERE}: {path} cannot be read: {error}. Give a text file with a Jinja template."
        ) from error
    _check_syntax(text, path)
    return text


def _check_syntax(text: str, path: str) -> None:
    """Raises ConfigError where transformers cannot parse the template. What it makes of a conversation is told when
    one is rendered: it may well refuse the one tried here."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[[{"role": "user", "content": "text"}]], chat_template=text)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{WHERE}: {path}, line {error.lineno}: {error.message}") from error
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return
