"""`headway broker`: runs the embedded server in a terminal of its own, or checks an existing server."""

import shlex
import signal
import time
from pathlib import Path
from types import FrameType

from headway.broker.client.broker import BlockingBroker
from headway.broker.connection.address import without_password
from headway.broker.errors import HeadwayError
from headway.broker.server.access import Role
from headway.broker.server.embedded import LOOPBACK, EmbeddedServer
from headway.deploy.launch.kept_server import WriteWatch
from headway.deploy.launch.processes import guarded
from headway.deploy.launch.server_traits import check_traits
from headway.deploy.printing import complain, say
from headway.deploy.run.directory import held, writable

POLL_S = 0.2
PATIENCE_S = 3.0
"""Seconds to wait for the server: a user waits for the answer."""
COMMANDS = {
    Role.LEARNER: "headway learner RECIPE.yaml",
    Role.WORKER: "headway workers --count 2",
    Role.SCORER: "headway scorers --count 1",
    Role.OBSERVER: "headway status --watch",
}


def run_server(directory: Path, port: int | None, host: str = LOOPBACK) -> int:
    """Serve until a signal, with a port also at `host`. The data stay in `directory`, and the next start continues with
    them."""
    stops: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        stops.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    with writable(directory, "--directory"):
        directory.mkdir(parents=True, exist_ok=True)
    with (
        held(directory.resolve(), "directory (--directory)"),  # two servers would spoil each other's files
        EmbeddedServer(directory.resolve(), port=port, has_users=True, host=host) as server,
        guarded(server.pid),
    ):
        say(f"Serving {server.url}, data in {directory}. Ctrl-C stops. In other terminals, each with its own user:")
        for role, command in COMMANDS.items():
            say(f"  export HEADWAY_RUN=NAME HEADWAY_BROKER={shlex.quote(server.url_of(role))}")
            say(f"  {command}")
        say(
            "Passwords are in the files that these URLs name; a reader of the learner's may do"
            " all that the learner does."
        )
        watch = WriteWatch(server, complain)
        while not stops:
            watch.look()
            if not server.is_alive():
                raise HeadwayError(
                    f"The server has died; its log is in {directory}. Starting again goes on with its data."
                )
            time.sleep(POLL_S)
    say("Stopped; starting again with the same --directory goes on with its data.")
    return 0


def check_server(url: str) -> int:
    """Print whether Headway can use the server at `url`, and its runs. Raises HeadwayError if Headway cannot use it."""
    check_traits(url, complain, timeout_s=PATIENCE_S)
    client = BlockingBroker(url, "headway-check", timeout_s=PATIENCE_S)
    try:
        runs = client.call(client.broker.status.runs_for_people())
    finally:
        client.close()
    say(f"{without_password(url)} answers. Runs: {runs}.")
    return 0
