"""Opens an implementation of the user's own, `package.module:Name`: imports and calls it, and checks it against its
seam."""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from headway.broker.errors import ConfigError, HeadwayError

from .kinds import check_offers, lacks
from .roots import ImportRoots


def make_own(
    path: str,
    seam: type,
    where: str,
    call: Callable[[Any], Any],
    *,
    roots: ImportRoots | None = None,
    not_asked: Collection[str] = (),
) -> Any:
    """Return the result of `call` on the class or function that `path` names.

    `where` is its key in the recipe. `roots`: below which it may be imported; by default the path itself, of a process
    whose operator gave it the recipe. `not_asked`: what it states that it cannot do.
    Raises ConfigError where `path` may not or cannot be imported, or where what it makes lacks something that the
    protocol `seam` promises; what the class itself raises is passed on.
    """
    own = (roots or ImportRoots((path,))).load(path, where)
    if inspect.isabstract(own):
        raise lacks(own, own.__abstractmethods__, seam, path, where)
    made = call(own)
    check_offers(made, seam, path, where, not_asked=not_asked)
    return made


@contextmanager
def in_one_paragraph(path: str, where: str) -> Iterator[None]:
    """Turn every error of the user's own code, and a call of sys.exit, into ConfigError."""
    try:
        yield
    except HeadwayError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: {path} cannot be made: {type(error).__name__}: {error}.") from error
