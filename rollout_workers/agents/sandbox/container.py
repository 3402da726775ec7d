"""CPython in a container of docker or podman, whose image brings its own Python."""

import os
import shutil
import uuid

from headway.broker.errors import ConfigError

from .base import SandboxOptions
from .launched import ENVIRONMENT, OPEN_FILES, LaunchedCommand, LaunchedSandbox, bootstrap_argv

SCRATCH = "/scratch"


class ContainerSandbox(LaunchedSandbox):
    """Runs CPython in a fresh container for each run, which is removed after it."""

    kind = "container"

    def command(self) -> LaunchedCommand:
        """Return what the launcher is to start for one run."""
        name = f"headway-sandbox-{uuid.uuid4().hex}"
        return LaunchedCommand(
            argv=[*arguments(self.options, name), self.options.image, *bootstrap_argv("python3")],
            environment=client_environment(),
            cleanup=[*self.options.container_command, "rm", "--force", name],
            watch=False,  # what runs below the launcher is the client
            chdir=SCRATCH,
        )


def arguments(options: SandboxOptions, name: str) -> list[str]:
    """Return the command that starts a container, up to its image."""
    size = options.scratch_bytes
    chosen = [*options.container_command, "run", "--rm", "--interactive", "--name", name, "--network", "none"]
    chosen += ["--pull", "never", "--read-only", "--user", "65534:65534", "--cap-drop", "ALL"]
    chosen += ["--security-opt", "no-new-privileges", "--ipc", "none", "--init"]
    chosen += ["--memory", str(options.memory_bytes), "--memory-swap", str(options.memory_bytes)]
    chosen += ["--pids-limit", str(options.processes + 1), "--ulimit", f"nofile={OPEN_FILES}", "--ulimit", "core=0"]
    chosen += ["--tmpfs", f"{SCRATCH}:rw,nosuid,nodev,size={size},mode=1777", "--log-driver", "none"]
    for variable, value in ENVIRONMENT.items():
        chosen += ["--env", f"{variable}={value}"]
    for path in (*options.readable, *options.python_path):
        chosen += ["--volume", f"{path}:{path}:ro"]
    return [*chosen, *options.container_arguments, "--entrypoint", ""]


def client_environment() -> dict[str, str]:
    """Return what the client finds its server by; code in the container sees none of it."""
    names = ("PATH", "HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME")
    return {name: value for name, value in os.environ.items() if name in names or name.startswith("DOCKER_")}


def check_client(command: tuple[str, ...]) -> None:
    """Raise ConfigError where the client is missing."""
    if not command or shutil.which(command[0]) is None:
        raise ConfigError(
            f"The sandbox container needs the program {command[0] if command else 'docker'}, which is not installed. "
            "Set container_command, or choose the kind monty, sandlock or bubblewrap."
        )
