"""Workers of another version of Headway are named in every place where users look, and are not restarted in vain."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from headway.broker import Broker
from headway.broker.connection.function_library import protocol
from headway.broker.errors import VERSION_EXIT
from headway.deploy.cli.main import cli
from tests.broker.scenario import begin, rules

from .terminals import DEADLINE_S, HEADWAY, machine_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (".namespace", "algorithms", "broker", "deploy", "learner", "rollout_workers", "weightsync")


def other_version(directory: Path) -> dict[str, str]:
    """Return the environment of a machine with another version, one of whose scripts has a line more."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, directory / package, symlinks=True, ignore=ignored)
    with (directory / "broker/scripts/leases.lua").open("a") as script:
        script.write("-- another version\n")
    (directory / "home").mkdir()
    return {
        **machine_of(directory / "home"),
        "PYTHONPATH": str(directory / ".namespace"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    made = other_version(tmp_path)
    (tmp_path / "home/tmp").mkdir()
    return made


@pytest.mark.slow
async def test_a_pool_of_another_version_is_named_and_not_restarted(
    broker: Broker, url: str, run_name: str, environment: dict[str, str]
) -> None:
    run = await begin(broker, rules(1), fed=8)
    await broker.status.set_state(run.owner, "training")
    workers = await asyncio.create_subprocess_exec(
        *(HEADWAY, "workers", "--count", "2", "--broker", url, "--run", run_name),
        env=environment,
        cwd=environment["HOME"],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(DEADLINE_S):
        output, _ = await workers.communicate()
    said = " ".join(output.decode().split())
    assert workers.returncode == VERSION_EXIT, said
    assert "Restarting worker-" not in said
    assert said.count("Restarting it cannot mend this. The other workers go on without it.") == 1
    assert "No worker is left: the workers of this command have been stopped." in said
    faults = (await broker.status.snapshot()).faults
    assert {fault.rule for fault in faults} == {"version"}
    assert {fault.worker.rsplit("-", 2)[1] for fault in faults} == {"0", "1"}
    for fault in faults:
        assert fault.host == os.uname().nodename
        assert f"protocol {protocol()} with the broker, and this process (Headway " in fault.reason
        assert "install the same version of Headway on both sides" in fault.reason
    printed = CliRunner().invoke(cli, ["status", "--broker", url, "--run", run_name])
    assert "Workers that were set aside in the last hour" in printed.stdout
    assert all(fault.worker in "".join(printed.stdout.split()) for fault in faults)
