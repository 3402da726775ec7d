"""The options of a kind that a recipe names: typed and closed; an error names the option nearest to a misspelt one."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from headway.broker.errors import ConfigError

from .kinds import did_you_mean

T = TypeVar("T")


def unknown_option(name: str, known: Iterable[str], where: str, of: str = "", keys: Iterable[str] = ()) -> ConfigError:
    """Return the error for an unknown option; `of` is the kind that lacks it, where `where` does not say so. `keys`:
    keys of the recipe that may have been meant."""
    known, named = list(known), {key.rpartition(".")[2]: key for key in keys}
    missing = f"{of} has no such option" if of else "no such option"
    key = get_close_matches(name, named, n=1)
    hint = did_you_mean(name, known) or (f"; did you mean {named[key[0]]}?" if key else ".")
    return ConfigError(f"{where}.{name}: {missing}{hint} Known: {', '.join(known) or 'none'}.")


def typed_options(options: Mapping[str, Any], into: type[T], where: str) -> T:
    """Convert a recipe's free-form options into the closed, typed struct that the chosen kind declares."""
    known = [field.name for field in msgspec.structs.fields(into)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise unknown_option(name, known, where)
    try:
        return msgspec.convert(dict(options), into)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}{_nearest_choice(str(error), into)}") from error


def _nearest_choice(fault: str, into: type[Any]) -> str:
    """Return the end of the sentence about a value that is none of those that an option takes."""
    found = re.fullmatch(r"Invalid enum value '(.*)' - at `\$\.(\w+)`", fault)
    if found is None:
        return "."
    choices = [str(one) for one in get_args(get_type_hints(into)[found[2]])]
    return (did_you_mean(found[1], choices) or ".") + f" Known: {', '.join(choices)}."
