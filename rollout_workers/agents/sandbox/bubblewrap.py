"""CPython under Debian's bubblewrap: namespaces of its own for files, processes, users, network and IPC."""

import os
import shutil

from headway.broker.errors import ConfigError

from .base import SandboxOptions
from .launched import ENVIRONMENT, LaunchedCommand, LaunchedSandbox, bootstrap_argv, interpreter

SCRATCH = "/scratch"


class BubblewrapSandbox(LaunchedSandbox):
    """Runs CPython in a file system that has its library, read-only, and a scratch directory."""

    kind = "bubblewrap"

    def command(self) -> LaunchedCommand:
        """Return what the launcher is to start for one run."""
        python, library = interpreter()
        bwrap = shutil.which(self.options.bubblewrap_command) or self.options.bubblewrap_command
        return LaunchedCommand(
            argv=[bwrap, *arguments(self.options, library), *bootstrap_argv(python)],
            own_tasks=2,  # bwrap outside, and its init process inside
            chdir=SCRATCH,
            limits_processes=os.getuid() != 0,  # the kernel doesn't count processes of root
        )


def arguments(options: SandboxOptions, library: str) -> list[str]:
    """Return bwrap's arguments."""
    size = ["--size", str(options.scratch_bytes)]
    chosen = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
    chosen += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--cap-drop", "ALL", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        chosen += ["--setenv", name, value]
    chosen += ["--ro-bind", "/usr", "/usr"]
    for path in ("/lib", "/lib64", "/bin"):  # links into /usr on newer systems, directories on older ones
        chosen += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    chosen += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for path in (library, *options.readable, *options.python_path):
        chosen += ["--ro-bind", path, path]
    chosen += ["--proc", "/proc", "--dev", "/dev", *size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    return [*chosen, *size, "--tmpfs", SCRATCH, "--remount-ro", "/", "--"]


def check_command(command: str) -> None:
    """Raise ConfigError where bwrap is missing."""
    if shutil.which(command) is None:
        raise ConfigError(
            f"The sandbox bubblewrap needs the program {command}, which is not installed: apt install bubblewrap, "
            "or choose the kind monty or sandlock."
        )
