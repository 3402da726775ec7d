"""Checks of the kinds that a recipe may name: those that come with Headway, and those of the user's own."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from inspect import getattr_static

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
