"""CPython under sandlock: Landlock confines its files, seccomp its system calls. It needs no privileges."""

import os

from headway.broker.errors import ConfigError

from .launched import ENVIRONMENT, OPEN_FILES, LaunchedCommand, LaunchedSandbox, bootstrap_argv, interpreter

# Landlock confines what files hold, not whom they belong to: without these, code of the same user could change the
# owner, the permissions, the times and the attributes of any file.
FILE_CALLS = """
chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat setxattr lsetxattr
fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat file_setattr mknod mknodat name_to_handle_at
open_by_handle_at inotify_add_watch fanotify_init
"""
# Nor other processes of the user: their priorities, their processors, their memory.
PROCESS_CALLS = """
setpriority ioprio_set sched_setaffinity sched_setscheduler sched_setparam sched_setattr migrate_pages move_pages kcmp
pidfd_open pidfd_getfd process_madvise setuid setgid setreuid setregid setresuid setresgid setgroups memfd_create syslog
statmount listmount
"""


class SandlockSandbox(LaunchedSandbox):
    """Runs CPython where it may read its own library, write its scratch directory, and reach nothing else."""

    kind = "sandlock"

    def command(self) -> LaunchedCommand:
        """Return what the launcher is to start for one run."""
        python, library = interpreter()
        options = self.options
        readable = [library, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom"]
        return LaunchedCommand(
            argv=bootstrap_argv(python),
            sandlock={
                "fs_readable": [path for path in readable if os.path.exists(path)]
                + [*options.readable, *options.python_path],
                "clean_env": True,
                "env": ENVIRONMENT,
                "max_processes": options.processes,
                "max_open_files": OPEN_FILES,
                "no_coredump": True,
                "extra_deny_syscalls": [*FILE_CALLS.split(), *PROCESS_CALLS.split()],
            },
        )


def check_kernel() -> None:
    """Raise ConfigError where the kernel lacks what sandlock needs."""
    import sandlock

    found, needed = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
    if found < needed:
        has = f"Landlock's ABI {found}" if found > 0 else "no Landlock"
        raise ConfigError(
            f"The sandbox sandlock needs Landlock's ABI {needed} (Linux 6.12 or newer); this kernel has {has}. "
            "Choose the kind monty or bubblewrap."
        )
    if os.uname().machine not in ("x86_64", "aarch64"):
        raise ConfigError("The sandbox sandlock runs on x86_64 and aarch64. Choose the kind monty.")
