"""A Slurm cluster of one node on this machine, which belongs to one test: munged, slurmctld and slurmd."""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.broker.topologies import free_port

START_S = 240.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_interval=2
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing_programs() -> list[str]:
    """Return the programs of a cluster that are not installed; Debian's slurm-wlm and munge have them."""
    return [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]


@contextmanager
def cluster(directory: Path, cpus: int = 16) -> Iterator[dict[str, str]]:
    """Yield the environment in which Slurm's commands reach the cluster."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    for name in ("state", "spool"):
        (directory / name).mkdir(parents=True)
    key = directory / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    config = directory / "slurm.conf"
    config.write_text(
        CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            user=pwd.getpwuid(os.getuid()).pw_name,
            directory=directory,
            cpus=cpus,
            controller_port=free_port(),
            node_port=free_port(),
        )
    )
    environment = {**os.environ, "PATH": path, "SLURM_CONF": str(config)}
    with ExitStack() as stack:
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={directory}/munge.socket"]
        munged += [f"--{what}-file={directory}/munged.{what}" for what in ("pid", "log", "seed")]
        stack.enter_context(_serving(munged, environment))
        stack.enter_context(_serving(["slurmctld", "-D", "-c"], environment))
        stack.enter_context(_serving(["slurmd", "-D", "-N", socket.gethostname().partition(".")[0]], environment))
        _await_node(environment)
        yield environment


@contextmanager
def _serving(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    time.sleep(0.5)  # each needs the one before it
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(240)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_node(environment: dict[str, str]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        said = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, check=False)
        if said.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    raise AssertionError(f"the cluster did not start: {said.stdout}{said.stderr}")
