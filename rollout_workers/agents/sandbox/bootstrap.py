"""Runs the code of a model where it is confined already, under the limits that a process sets for itself.

Its text is given to `python -c`. Its standard input begins with 16 digits, the length of a JSON text, and that text;
what follows is the standard input of the code. It imports the standard library only, of any Python from 3.8.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from typing import Any

MEMORY, PROCESSES, DISK, UNCONFINED = 97, 98, 99, 96  # exit codes; launcher.py reads them

# Numbers of system calls by which code could hold memory outside its limits, or reach the kernel's rarer parts:
# memfd_create, shmget, msgget, semget, add_key, request_key, keyctl, io_uring_setup, userfaultfd, bpf,
# perf_event_open, ptrace, kcmp; then prlimit64, which is denied for other processes only.
NUMBERS = {
    "x86_64": (0xC000003E, (319, 29, 68, 64, 248, 249, 250, 425, 323, 321, 298, 101, 312), 302),
    "aarch64": (0xC00000B7, (279, 194, 186, 190, 217, 218, 219, 425, 282, 280, 241, 117, 272), 261),
}


def read_exactly(size: int) -> bytes:
    """Returns the next bytes of the standard input, and reads none after them."""
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 16))
        if not part:
            sys.exit("The input ended early.")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def set_limits(limits: dict[str, int]) -> None:
    """Sets the limits that hold for each process, and that no process can raise again."""
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def drop_privileges() -> None:
    """Gives up all capabilities, for good, and denies system calls. Raises OSError if the kernel refuses."""
    import ctypes
    import struct

    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int, what: str) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), what)

    checked(libc.prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    header, data = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    checked(libc.capset(ctypes.create_string_buffer(header, 8), ctypes.create_string_buffer(data, 24)), "capset")
    program = filter_program(struct, os.uname().machine)
    instructions = ctypes.create_string_buffer(program, len(program))
    filtering = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions))
    checked(libc.prctl(22, 2, ctypes.create_string_buffer(filtering, 16), 0, 0), "PR_SET_SECCOMP")


def filter_program(struct: Any, machine: str) -> bytes:
    """Returns a BPF program that denies the system calls of NUMBERS, and those of other architectures."""
    architecture, denied, prlimit = NUMBERS[machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    deny, allow = (give, 0, 0, 0x00050000 | errno.EPERM), (give, 0, 0, 0x7FFF0000)
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), deny, (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), deny]
    for number in denied:
        program += [(equal, 0, 1, number), deny]
    # The first argument of prlimit64 is a process, 0 for its own; both halves of its register must be 0.
    program += [(equal, 0, 5, prlimit), (load, 0, 0, 16), (equal, 0, 2, 0), (load, 0, 0, 20), (equal, 1, 0, 0), deny]
    program += [allow]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def exit_code(error: BaseException) -> int:
    """Returns the code that says why the code ended."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return MEMORY
    if isinstance(error, OSError) and error.errno == errno.EAGAIN:
        return PROCESSES
    return DISK if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG) else 1


def write_files(files: dict[str, str]) -> None:
    """Writes files below the working directory."""
    import base64

    for name, content in files.items():
        directory = os.path.dirname(name)
        if directory:
            os.makedirs(directory, exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(content))


def run(code: str) -> int:
    """Runs code as the main module, and returns an exit code."""
    import linecache
    import traceback
    import types

    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    linecache.cache["main.py"] = (len(code), None, code.splitlines(True), "main.py")
    try:
        exec(compile(code, "main.py", "exec", dont_inherit=True), module.__dict__)
        return 0
    except Exception as error:  # noqa: BLE001 - whatever the code raises
        status = exit_code(error)
        shown = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, shown, limit=-20))
        sys.stderr.write(text if len(text) < 4000 else f"{text[:2000]}\n...\n{text[-2000:]}")
        return status


def main() -> None:
    """Runs what the standard input holds."""
    asked = json.loads(read_exactly(int(read_exactly(16))))
    try:
        if asked["chdir"]:
            os.chdir(asked["chdir"])
        write_files(asked["files"])
        set_limits(asked["limits"])
        drop_privileges()
    except Exception as error:  # noqa: BLE001 - the code is not run, whatever it is
        sys.stderr.write(f"The process could not confine itself: {error!r}")
        sys.stderr.flush()
        os._exit(UNCONFINED)
    sys.path += asked["python_path"]
    sys.argv = ["main.py"]
    status = run(asked["code"])
    if status:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        os._exit(status)  # whatever the code has left to be run at the exit


main()
