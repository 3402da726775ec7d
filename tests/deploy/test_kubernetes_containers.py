"""The containers of `headway launch kubernetes` work, with the very commands and probes that the manifests name.

A server on this machine takes the place of the broker's pod, and processes of the test take that of Headway's.
"""

import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from headway.broker.server.access import Role
from headway.broker.server.embedded import find_server
from headway.deploy.cli.main import cli
from tests.broker.topologies import free_port

from .kubernetes_objects import BASE, headway_lines, launch, objects_in
from .test_cli import clean_environment

DEADLINE_S = 240.0


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_ray_job_that_is_tried_again_resumes(tmp_path: Path) -> None:
    (line,) = headway_lines({"command": ["bash", "ray.sh"]}, {"ray.sh": (BASE / "ray" / "ray.sh").read_text()})
    words = [word for word in line if word != '"${resume[@]}"']
    cli.commands["ray"].make_context("headway", words[1:])
    program = tmp_path / "headway"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    script = (BASE / "ray" / "ray.sh").read_text().replace("cd /work", f"cd {tmp_path}")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HEADWAY_RUN": "first"}

    def said() -> str:
        return subprocess.run(
            ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert said() == " ".join(words) + "\n"
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "incarnation").touch()
    assert said() == " ".join([*words, "--resume"]) + "\n"


def server_arguments(scripts: Path, port: int, has_tls: bool) -> list[str]:
    """Return the arguments of the broker's container, with the paths and the port of this machine."""
    (broker,) = [one for one in objects_in(scripts / "base" / "broker") if one["kind"] == "StatefulSet"]
    (container,) = broker["spec"]["template"]["spec"]["containers"]
    data = scripts / "data"
    data.mkdir()
    own = {"/etc/headway/broker": f"{scripts}/secrets", "--dir /data": f"--dir {data}"}
    own |= {"--tls-port 6379": f"--tls-port {port}"} if has_tls else {"--port 0": f"--port {port}"}
    arguments = [with_own(argument, own) for argument in container["args"]]
    return [argument for argument in arguments if has_tls or not argument.startswith("--tls")]


def with_own(text: str, own: dict[str, str]) -> str:
    for old, new in own.items():
        text = text.replace(old, new)
    return text


@pytest.fixture
def served() -> Iterator[tuple[Path, int]]:
    """Yield a launch directory, and the port of a server that runs with the broker's own arguments, but without TLS."""
    scripts, port = launch(), free_port()
    process = subprocess.Popen([find_server(), *server_arguments(scripts, port, has_tls=False)])
    try:
        yield scripts, port
    finally:
        process.terminate()
        process.wait()


def until_answered(ask: Callable[[], object], what: type[Exception]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            ask()
            return
        except what:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_the_brokers_arguments_start_a_server_that_knows_the_roles_and_nobody_else(served: tuple[Path, int]) -> None:
    scripts, port = served
    for role in Role:
        password = (scripts / "secrets" / "passwords" / role).read_text().strip()
        with redis.Redis(port=port, username=f"headway-{role}", password=password) as client:
            until_answered(client.ping, redis.ConnectionError)
    with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    password = (scripts / "secrets" / "passwords" / "learner").read_text().strip()
    url = f"redis://headway-learner:{password}@127.0.0.1:{port}"
    checked = subprocess.run([sys.executable, "-m", "headway", "broker", "--url", url], env=clean_environment())
    assert checked.returncode == 0  # among others: noeviction


def test_the_certificate_is_for_the_brokers_service_and_no_other_host() -> None:
    secrets = launch() / "secrets"
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(secrets / "tls.crt", secrets / "tls.key")
    client = ssl.create_default_context(cafile=str(secrets / "tls.crt"))
    assert handshake(server, client, "headway-broker")
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(server, client, "elsewhere")


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> bool:
    ours, theirs = socket.socketpair()

    def accept() -> None:
        with theirs, suppress(OSError):
            server.wrap_socket(theirs, server_side=True).close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=host, do_handshake_on_connect=False) as connection:
            connection.do_handshake()
            return connection.getpeercert() is not None
    finally:
        thread.join()


STAND_IN = """#!/bin/bash
if [ "$1" = broker ]; then echo "headway $*" >> "$LOG"; exit 0; fi
trap 'echo drained >> "$LOG"; exit 0' TERM
mkdir -p "runs/$HEADWAY_RUN"
touch "runs/$HEADWAY_RUN/incarnation"
echo "headway $*" >> "$LOG"
for ((i = 0; i < SECONDS_OF_WORK * 10; i++)); do sleep 0.1; done
exit "$CODE"
"""


class LearnersPod:
    """Starts learner.sh as the pod does, with a process in place of Headway's."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.log = directory, directory / "log"
        (directory / "headway").write_text(STAND_IN)
        (directory / "headway").chmod(0o755)

    def start(self, *, seconds: int, code: int = 0) -> "subprocess.Popen[str]":
        environment = {
            **clean_environment(),
            "PATH": f"{self.directory}:{os.environ['PATH']}",
            "HEADWAY_RUN": "first",
            "HEADWAY_BROKER": "redis://nowhere",
            "LOG": str(self.log),
            "SECONDS_OF_WORK": f"{seconds}",
            "CODE": f"{code}",
        }
        script = str(BASE / "learner" / "learner.sh")
        return subprocess.Popen(
            ["bash", script], env=environment, cwd=self.directory, stdout=subprocess.PIPE, text=True
        )

    def said(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def until_said(self, words: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not any(words in line for line in self.said()):
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)


def test_a_learners_pod_that_is_stopped_drains_and_the_next_one_resumes(tmp_path: Path) -> None:
    pod = LearnersPod(tmp_path)
    first = pod.start(seconds=60)
    pod.until_said("headway learner /etc/headway/recipe/recipe.yaml")
    first.terminate()
    assert first.communicate()[0] == ""
    assert first.returncode == 0
    assert pod.said()[-1] == "drained"
    pod.log.unlink()
    second = pod.start(seconds=60)
    pod.until_said("headway learner /etc/headway/recipe/recipe.yaml --resume")
    second.terminate()
    second.communicate()


def test_a_learners_pod_waits_once_the_run_is_over_and_still_ends_at_once(tmp_path: Path) -> None:
    pod = LearnersPod(tmp_path).start(seconds=0)
    assert pod.stdout is not None
    assert pod.stdout.readline().startswith("The run is over. Copy what you need from /work/runs/first")
    assert pod.poll() is None
    pod.terminate()
    pod.communicate()
    assert pod.returncode == 0


def test_a_learners_pod_fails_as_the_learner_does(tmp_path: Path) -> None:
    pod = LearnersPod(tmp_path).start(seconds=0, code=3)
    assert pod.communicate()[0] == ""
    assert pod.returncode == 3


def test_the_shipped_scripts_are_clean() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    for script in BASE.rglob("*.sh"):
        said = subprocess.run(["shellcheck", "-s", "bash", script], capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stdout


@pytest.fixture
def client_program(tmp_path: Path) -> Path:
    """Return a folder with `valkey-cli`, or with redis-cli under that name; it answers instead of the image's own."""
    found = shutil.which("valkey-cli") or shutil.which("redis-cli")
    if found is None:
        pytest.skip("neither valkey-cli nor redis-cli is installed")
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "valkey-cli").symlink_to(found)
    return folder


def test_the_brokers_probes_succeed_while_it_serves_and_only_then(
    served: tuple[Path, int], client_program: Path
) -> None:
    scripts, port = served
    (scripts / "secrets" / "password").symlink_to("passwords/observer")
    (broker,) = [one for one in objects_in(BASE / "broker") if one["kind"] == "StatefulSet"]
    (container,) = broker["spec"]["template"]["spec"]["containers"]
    probes = [container[f"{kind}Probe"]["exec"]["command"] for kind in ("startup", "readiness", "liveness")]
    own = {"--tls --cacert /etc/headway/broker/ca.crt": f"-p {port}", "/etc/headway/broker": f"{scripts}/secrets"}
    environment = {**os.environ, "PATH": f"{client_program}:{os.environ['PATH']}"}

    def succeeds(probe: list[str]) -> bool:
        command = [with_own(word, own) for word in probe]
        return subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0

    deadline = time.monotonic() + DEADLINE_S
    while not succeeds(probes[0]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert all(succeeds(probe) for probe in probes)
    (scripts / "secrets" / "passwords" / "observer").write_text("wrong")
    assert not any(succeeds(probe) for probe in probes)
