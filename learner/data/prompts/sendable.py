"""The broker and tokenizers take text in UTF-8, numbers of 64 bits, lists, and mappings with names."""

import msgspec

from headway.broker.errors import ConfigError


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
