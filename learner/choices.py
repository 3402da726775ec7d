"""What a recipe may name: built-in kinds and typed options. Users' own go by import path: `broker.user_code`."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

from broker.errors import ConfigError

T = TypeVar("T")


def unknown_kind(kind: str, known: Iterable[str], where: str) -> ConfigError:
    """The error for a kind that there is not."""
    known = sorted(known)
    return ConfigError(
        f"{where}: there is no {kind!r}{did_you_mean(kind, known) or '.'} Known: {', '.join(known)}; "
        "your own as package.module:name."
    )


def unknown_option(name: str, known: Iterable[str], where: str, of: str = "") -> ConfigError:
    """The error for an option that there is not; `of` is the kind that lacks it, where `where` does not say."""
    known = list(known)
    missing = f"{of} has no such option" if of else "no such option"
    return ConfigError(
        f"{where}.{name}: {missing}{did_you_mean(name, known) or '.'} Known: {', '.join(known) or 'none'}."
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing where nothing is near."""
    nearest = get_close_matches(word, list(known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def typed_options(options: Mapping[str, Any], into: type[T], where: str) -> T:
    """A recipe's free-form options as the struct that the chosen kind declares, closed and typed."""
    known = [field.name for field in msgspec.structs.fields(into)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise unknown_option(name, known, where)
    try:
        return msgspec.convert(dict(options), into)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
