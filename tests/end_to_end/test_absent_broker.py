"""A role whose broker is away ends at Ctrl-C, although it waits for each answer for hours."""

import os
import signal
import sys
from pathlib import Path

import pytest

from headway.broker.server.embedded import EmbeddedServer
from tests.broker.topologies import free_port, wait_until

from .recipes import write_recipe
from .terminals import DEADLINE_S, Terminal, Terminals

pytestmark = pytest.mark.slow

PATIENT = f"""#!{sys.executable}
import headway.broker.client.broker as client

client.BlockingBroker.__init__.__kwdefaults__["timeout_s"] = 10_000.0
client.open_broker.__kwdefaults__["timeout_s"] = 10_000.0
from headway.deploy.cli.main import main

main()
"""
"""`headway`, with a broker that may take hours to answer."""


@pytest.fixture
def patient(tmp_path: Path) -> str:
    path = tmp_path / "headway"
    path.write_text(PATIENT)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_role_ends_at_a_signal_while_its_broker_is_away(
    terminals: Terminals, tmp_path: Path, patient: str, number: signal.Signals
) -> None:
    with EmbeddedServer(tmp_path / "server", port=free_port()) as server:
        recipe = write_recipe(terminals.directory("learner"), learner={"steps": 100_000})
        settings = {"HEADWAY_BROKER": server.url, "HEADWAY_RUN": "left"}
        learner = terminals.open("learner", "learner", recipe, headway=patient, **settings)
        worker = terminals.open("worker", "worker", headway=patient, **settings)
        wait_until(lambda: "step 2/" in said_alive(learner, worker), DEADLINE_S)
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.is_alive())
        for role in (learner, worker):
            role.send(number)
        learner.succeeds()
        worker.succeeds()
        assert "Stopping: the learner finishes its step and writes a checkpoint." in learner.said
        assert "Stopped. To go on from the last checkpoint, add --resume." in learner.said


def said_alive(learner: Terminal, worker: Terminal) -> str:
    """Return what the learner has said. Both must be alive."""
    for terminal in (learner, worker):
        assert terminal.exit_code() is None, terminal.tail()
    return learner.said
