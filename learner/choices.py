"""The options of what a recipe names, as workers check them too (`broker.user_code.options`)."""

from broker.user_code.options import typed_options, unknown_option

__all__ = ["typed_options", "unknown_option"]
