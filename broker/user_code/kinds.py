"""Checks of the kinds that a recipe may name, those of Headway and those of the user's own, and of a kind's options.

Options are typed and closed: an error names the option nearest to a misspelt one.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from inspect import getattr_static
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from headway.broker.errors import ConfigError


def unknown_kind(kind: str, known: Iterable[str], where: str) -> ConfigError:
    """Return the error for an unknown kind. `where` is its key in the recipe."""
    known = sorted(known)
    module, _, name = kind.rpartition(".")
    own = f"; did you mean '{module}:{name}'?" if all(map(str.isidentifier, kind.split("."))) and module else "."
    if module and name == "py":
        own = f"; did you mean '{module.rpartition('/')[2]}:NAME', with a name of that file?"
    return ConfigError(
        f"{where}: there is no {kind!r}{did_you_mean(kind, known) or own} Known: {', '.join(known)}; "
        "your own as package.module:name."
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or "" where no known word is near."""
    near = get_close_matches(word, list(known))
    swapped = [one for one in near if sorted(one) == sorted(word)]  # two letters in the other order are a usual slip
    return f"; did you mean {(swapped or near)[0]!r}?" if near else ""


def check_offers(made: object, seam: type, path: str, where: str, *, not_asked: Collection[str] = ()) -> None:
    """Raise ConfigError where the object `made` by the user's own `path` lacks a member of the protocol `seam`. Members
    in `not_asked`, which it has stated that it cannot offer, may be missing."""
    promised = {name for base in seam.__mro__ for name in (*vars(base), *getattr(base, "__annotations__", ()))}
    promised = {name for name in promised if not name.startswith("_") and name not in not_asked}
    if missing := [name for name in promised if not hasattr(made, name) or _is_stub(made, name, seam)]:
        raise lacks(type(made), missing, seam, path, where)


def _is_stub(made: object, name: str, seam: type) -> bool:
    """A class that names a protocol as its base inherits the empty body of each method that it does not define."""
    inherited = getattr_static(type(made), name, None)
    return getattr(seam, "_is_protocol", False) and inherited is getattr_static(seam, name, made)


def lacks(kind: type, missing: Iterable[str], seam: type, path: str, where: str) -> ConfigError:
    """The error for a class that lacks something that the protocol `seam` promises."""
    return ConfigError(
        f"{where}: {path!r} makes a {kind.__name__}, which lacks {', '.join(sorted(missing))}; what it must offer"
        f" stands in {seam.__module__}:{seam.__name__}."
    )


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
