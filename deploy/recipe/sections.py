"""Some sections of a recipe on their own, for commands that take overrides and no whole recipe."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from headway.broker.errors import ConfigError

from .files import with_own_options
from .limits import beyond_limits
from .values import check_plain
from .words import check_shape, explain

Sections = TypeVar("Sections", bound=msgspec.Struct)
SOURCE = "override"


def overridden(sections: Sections, overrides: Sequence[str]) -> Sections:
    """Return the same sections with `a.b=c` overrides, as `with_own_options` applies them. Raises ConfigError for a key
    or a value that none of them takes."""
    given = msgspec.msgpack.decode(msgspec.msgpack.encode(sections))  # with lists, which overrides can change
    raw = with_own_options(given, overrides, SOURCE)
    check_plain(raw, SOURCE)
    check_shape(raw, type(sections), SOURCE)
    try:
        chosen = msgspec.convert(raw, type(sections), strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(error, raw, type(sections), SOURCE)) from error
    for complaint in beyond_limits(chosen):
        raise ConfigError(f"{SOURCE}: {complaint}")
    return chosen
