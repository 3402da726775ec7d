"""A real server on a unix socket of its own, for every test that asks for one."""

import logging
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from headway.broker import BlockingBroker, Broker, open_broker
from headway.broker.server.embedded import EmbeddedServer

from .processes import await_end_of_hosts

# Tests share the cores with each other and with the processes that they start. Threads of torch that wait for each
# other there cost several times what they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes that tests start would compile all of the project anew, each of them, where this is set.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
settings.register_profile("no-deadline", deadline=None)  # a busy machine is no failure
settings.load_profile("no-deadline")
# Ctrl-C is ignored where the tests run in the background, and so would it be by all processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--no-skips`, under which a test that would be skipped for a missing tool fails with the reason."""
    parser.addoption("--no-skips", action="store_true", help="a test that would be skipped fails")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that no process is left alone with one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure, where `--no-skips` is given."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        report.outcome, report.longrepr = "failed", f"skipped: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why tests failed that passed when they ran once more: each has a race, which is to be found."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"{report.nodeid}, before it ran once more")
        terminalreporter.write_line(report.longreprtext)
        for name, text in report.sections:
            terminalreporter.section(name, sep="-")
            terminalreporter.write_line(text)


@pytest.fixture(autouse=True)
def state_of_the_process() -> Iterator[None]:
    """Restore the level of the log and the signal handlers, which a command under test may change for this process."""
    root = logging.getLogger()
    level = root.level
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    root.setLevel(level)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def _no_host_left() -> Iterator[None]:
    """Let hosts of user code end that a module's tests left to the garbage collector: the next module may look for
    processes that are left."""
    yield
    await_end_of_hosts()


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_left() -> Iterator[None]:
    """End the process group of a backend that a module's tests have opened in this process: the next module may have
    one of its own, or none."""
    yield
    distributed = sys.modules.get("torch.distributed")  # most modules have not imported it
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def _torch_threads_settable() -> Iterator[None]:
    """Let the next module set torch's threads: vLLM for CPUs puts a function in place of torch's that does nothing in a
    process where one of its engines has run."""
    yield
    torch = sys.modules.get("torch")  # most modules have not imported it
    if torch is not None:
        torch.set_num_threads = torch._C.set_num_threads  # type: ignore[attr-defined]


@pytest.fixture(autouse=True, scope="module")
def _no_cpu_shim_left() -> Iterator[None]:
    """Give torch its own functions back after a module that built Megatron's model in this process."""
    yield
    shim = sys.modules.get("headway.learner.backends.megatron.cpu_shim")  # most modules have not imported it
    if shim is not None:
        shim.remove_cpu_shim()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "server") as running:
        yield running
        if running.is_alive():  # no test needs its data now, and to save them takes a tenth of a second
            os.kill(running.pid, signal.SIGKILL)


@pytest.fixture
def url(server: EmbeddedServer) -> str:
    return server.url


@pytest.fixture
def run_name() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def blocking(url: str, run_name: str) -> Iterator[BlockingBroker]:
    opened = BlockingBroker(url, run_name)
    yield opened
    opened.close()


@pytest.fixture
async def broker(url: str, run_name: str) -> AsyncIterator[Broker]:
    opened = await open_broker(url, run_name)
    yield opened
    await opened.close()


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Give torch its number of threads back after the test."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
