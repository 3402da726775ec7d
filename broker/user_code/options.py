"""The options of what a recipe names: typed, closed, with the nearest one for a misspelt one."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from broker.errors import ConfigError

from .kinds import did_you_mean

T = TypeVar("T")


def unknown_option(name: str, known: Iterable[str], where: str, of: str = "") -> ConfigError:
    """The error for an option that there is not; `of` is the kind that lacks it, where `where` does not say."""
    known = list(known)
    missing = f"{of} has no such option" if of else "no such option"
    return ConfigError(
        f"{where}.{name}: {missing}{did_you_mean(name, known) or '.'} Known: {', '.join(known) or 'none'}."
    )


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
