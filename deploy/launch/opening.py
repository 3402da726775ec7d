"""Opens a run's launcher. This is no part of the room's page, which every role imports before it ties itself to its
parent."""

from typing import Any

from broker.errors import ConfigError
from broker.user_code.roots import ImportRoots
from deploy.recipe.recipe import LauncherConfig

from .base import Launcher


def open_launcher(config: LauncherConfig) -> Launcher:
    """Open the recipe's launcher. A user's own is called as Class(**options). Raises ConfigError if it cannot be made
    or is no launcher."""
    made = _class_of(config.kind)
    try:
        launcher = made(**config.options)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"launcher: {config.kind} cannot be made: {type(error).__name__}: {error}.") from error
    if not isinstance(launcher, Launcher):
        raise ConfigError(f"launcher.kind: {config.kind!r} is no deploy.launch.base.Launcher.")
    return launcher


def _class_of(kind: str) -> Any:
    match kind:
        case "local":
            from .processes import LocalLauncher

            return LocalLauncher
        case path:
            return ImportRoots((path,)).load(path, "launcher.kind")
