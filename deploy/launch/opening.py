"""Opens a run's launcher. This is no part of the room's page, which every role imports before it ties itself to its
parent."""

from headway.broker.errors import ConfigError
from headway.broker.installation import is_installed
from headway.broker.user_code.import_paths import in_one_paragraph, load_custom
from headway.deploy.recipe.recipe import LauncherConfig

from .base import Launcher


def open_launcher(config: LauncherConfig) -> Launcher:
    """Open the recipe's launcher. A user's own is called as Class(**options). Raises ConfigError if it cannot be made
    or is no launcher."""
    with in_one_paragraph(config.kind, "launcher"):
        match config.kind:
            case "local":
                from .processes import LocalLauncher

                return LocalLauncher(**config.options)
            case "ray":
                if not is_installed("ray"):
                    raise ConfigError(
                        "launcher.kind=ray needs Ray, which is not installed. pip install 'headway[ray]'."
                    )
                from .on_ray import RayLauncher

                return RayLauncher(**config.options)
            case path:
                launcher: Launcher = load_custom(path, Launcher, "launcher.kind", lambda own: own(**config.options))
                return launcher
