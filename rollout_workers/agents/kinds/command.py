"""`command`: an unchanged program plays each episode, in a process of its own, through an OpenAI or Anthropic client.

Its environment names the endpoint (OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY) and a file
with the task as JSON (HEADWAY_TASK: id, text, messages, ground_truth, ...). It begins in an empty directory, which is
removed after it. A last line of its output such as {"reward": 1.0, "steps": 3} is the episode's outcome; without one,
the run's reward functions score the model's last answer.
"""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.broker.errors import HeadwayError
from headway.broker.user_code.import_paths import ImportRoots
from headway.broker.user_code.leftovers import kill_marked
from headway.broker.user_code.pool import MARK
from headway.rollout_workers.agents.episode import Agent, AgentEpisode, AgentTask, Outcome, Resume
from headway.rollout_workers.agents.tools.threads import uncancelled

from .base import check_program, finite, numbers_of, outcome, program_path

MOST_TAIL_BYTES = 1 << 16
"""So much of the end of a program's output is kept."""
MOST_TOLD = 2000
"""So many characters of the end of its errors are told."""
FLUSH_S = 5.0
"""The longest wait for what a program had written before its end."""
TASK = "HEADWAY_TASK"
"""The variable that names the file with the task; by it all processes of an episode are known."""
NOT_PASSED_ON = ("HEADWAY_", "OPENAI_", "ANTHROPIC_", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")
"""Variables of this process that its programs do not get: they may hold secrets, or are meant for Headway's own."""


class CommandOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The program."""

    command: Annotated[list[str], Meta(min_length=1)]
    """A program and its arguments, of which those with ./ before them lie in the operator's directory. The program lies
    there, or is allowed by --allow-import."""
    environment: dict[str, str] = {}
    """Further environment variables."""
    number_is_reward: bool = False
    """Whether a last line of its output that is only a number is the reward, too."""
    resume: Resume = "replay"
    """restart: where the program has effects that outlast it, or draws at random."""


class ProgramFailedError(HeadwayError):
    """The agent's program ended with another exit code than 0."""


class CommandAgent(Agent):
    """Starts a process for each episode."""

    def __init__(self, options: CommandOptions, roots: ImportRoots, where: str) -> None:
        check_program(options.command, roots, f"{where}.command")
        program, *arguments = program_path(options.command, roots.directory)
        here = roots.directory.resolve()
        self._command = [program, *(str(here / one[2:]) if one.startswith("./") else one for one in arguments)]
        self._options = options
        self._guard = _Guard()
        self.resume = options.resume

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode. Raises ProgramFailedError."""
        directory = Path(tempfile.mkdtemp(prefix="headway-agent-"))
        process: asyncio.subprocess.Process | None = None
        output, errors = _Tail(), _Tail()
        try:
            file, work = _task_file(directory), directory / "work"
            file.write_bytes(msgspec.json.encode(task))
            work.mkdir()
            await self._guard.start()
            process = await self._start(work, self._environment(episode, file), output.sink, errors.sink)
            self._guard.watch(process.pid, directory)
            output.start()
            errors.start()
            await process.wait()
        finally:
            await uncancelled(self._free(process, directory, output, errors))
        if process.returncode:
            how = f"exit code {process.returncode}"
            if process.returncode < 0:
                how = signal.Signals(-process.returncode).name
            raise ProgramFailedError(
                f"The agent's program {self._options.command[0]} ended with {how}. The end of its errors:"
                f" {errors.kept.decode(errors='replace')[-MOST_TOLD:].strip() or 'none'}"
            )
        return _outcome(output.kept, self._options.number_is_reward, self._options.command[0])

    def _start(self, work: Path, environment: dict[str, str], output: int, errors: int) -> Any:
        return asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=work,
            env=environment,
            start_new_session=True,
        )

    def _environment(self, episode: AgentEpisode, task_file: Path) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)}
        local = ",".join(filter(None, (inherited.get("NO_PROXY"), "127.0.0.1,localhost")))
        return {
            **inherited,
            "PATH": os.pathsep.join(filter(None, (str(Path(sys.executable).parent), inherited.get("PATH")))),
            "NO_PROXY": local,
            "no_proxy": local,
            **self._options.environment,
            "OPENAI_BASE_URL": episode.base_url,
            "OPENAI_API_BASE": episode.base_url,
            "OPENAI_API_KEY": episode.api_key,
            "ANTHROPIC_BASE_URL": episode.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": episode.api_key,
            TASK: str(task_file),
            **({MARK: os.environ[MARK]} if MARK in os.environ else {}),
        }

    async def _free(self, process: asyncio.subprocess.Process | None, directory: Path, *tails: "_Tail") -> None:
        """Kill all of the program's group and what has left it, and remove its directory."""
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await asyncio.to_thread(kill_marked, TASK, str(_task_file(directory)))
        await asyncio.gather(*(tail.end() for tail in tails))
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        if process is not None:
            self._guard.forget(process.pid)

    async def close(self) -> None:
        """End the guard. Idempotent."""
        await self._guard.close()


class _Guard:
    """A process that outlives this one by an instant: where this one is killed, it kills the programs that still run,
    and removes their directories."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start it, where it does not run."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(Path(__file__).with_name("command_guard.py"))),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    env={},  # without the mark of this process's own, which it is to outlive by an instant
                )

    def watch(self, group: int, directory: Path) -> None:
        """Have a process group killed, and a directory removed, when this process ends."""
        self._tell(f"+ {group} {directory}\n")

    def forget(self, group: int) -> None:
        """Leave a process group alone, which has ended."""
        self._tell(f"- {group}\n")

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(line.encode())

    async def close(self) -> None:
        """End it."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()
            self._process = None


class _Tail:
    """The end of what a program writes into one pipe. The pipe is ours and not the process's, whose `wait` would wait
    for whatever it has left running with the pipe open."""

    def __init__(self) -> None:
        self._source, self.sink = os.pipe()
        self.kept = b""
        self._reading: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Read, once the program has its end of the pipe."""
        os.close(self.sink)
        self.sink = -1
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        stream = asyncio.StreamReader()
        source = os.fdopen(self._source, "rb", buffering=0)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), source)
        try:
            while chunk := await stream.read(MOST_TAIL_BYTES):
                self.kept = (self.kept + chunk)[-MOST_TAIL_BYTES:]
        finally:
            transport.close()

    async def end(self) -> None:
        """Read what is left, for as long as something holds the pipe open but no longer than FLUSH_S; free the pipe."""
        if self._reading is None:
            os.close(self._source)
            os.close(self.sink)
            return
        await asyncio.wait([self._reading], timeout=FLUSH_S)
        self._reading.cancel()
        await asyncio.wait([self._reading])


def _task_file(directory: Path) -> Path:
    return directory / "task.json"


def _outcome(output: bytes, number_is_reward: bool, program: str) -> Outcome:
    """Return what the last line of the output says of the reward; None where it says nothing of it."""
    lines = output.decode(errors="replace").strip().splitlines()
    try:
        said = msgspec.json.decode(lines[-1]) if lines else None
    except msgspec.DecodeError:
        return None
    if isinstance(said, Mapping) and "reward" in said:
        measures = {name: value for name, value in numbers_of(said).items() if name != "reward"}
        reward = None if said["reward"] is None else finite(said["reward"], f"{program}: the reward in its last line")
        return outcome(reward, measures)
    if number_is_reward and isinstance(said, int | float):
        return finite(said, f"{program}: the reward in its last line")
    return None
