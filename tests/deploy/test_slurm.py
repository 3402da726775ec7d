"""The batch scripts of `headway launch slurm`: their heads, their passwords, and a job that drains and goes on.

With HEADWAY_TEST_SLURM=1 a run goes through them on a real cluster of one node; Debian's slurm-wlm and munge have the
programs that this needs.
"""

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from headway.broker.server.access import Role
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.cli.main import answer
from tests.broker.topologies import free_port

from .slurm_cluster import cluster, missing_programs
from .test_cli import clean_environment

POOLS = "workers.pools=[{name: big, count: 3, engine: {kind: vllm, options: {tensor_parallel_size: 2}}}]"
DEADLINE_S = 240.0
DRAINED = "Drained; the job goes back into the queue"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def launch(*arguments: str) -> Path:
    assert answer(["launch", "slurm", "arithmetic.yaml", *arguments, "--output", "launch"]) == 0
    return Path.cwd() / "launch"


def head(script: Path) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", script.read_text(), re.M)


def settings(script: Path, *names: str) -> list[str]:
    """Return the values that bash reads for these settings."""
    lines = [line for line in script.read_text().splitlines() if line.partition("=")[0] in names]
    shown = "; ".join(f'printf "%s\\n" "${{{name}[@]}}"' for name in names)
    text = "\n".join([*lines, shown])
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout.splitlines()


def test_every_role_has_a_script_and_one_submits_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["launch", "slurm", "arithmetic.yaml", "--output", "x", "--json"]) == 0
    written = [Path(path).name for path in json.loads(capsys.readouterr().out)["files"]]
    assert written == ["submit.sh", "broker.sh", "learner.sh", "workers.sh", "stop.sh"]
    assert sorted(path.name for path in (tmp_path / "x").glob("*.sh")) == sorted(written)
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


def test_a_dry_run_prints_the_scripts_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry = ["launch", "slurm", "arithmetic.yaml", "--output", "launch", "--dry-run"]
    assert answer([*dry, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["files"]
    assert answer(dry) == 0
    printed = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert {path.name: path.read_text() for path in launch().glob("*.sh")} == shown
    assert all(f"# {name}\n{text.rstrip()}\n" in printed for name, text in shown.items())


def test_a_pool_without_workers_has_no_script() -> None:
    directory = launch(POOLS, "workers.count=0")
    assert [path.name for path in directory.glob("workers*.sh")] == ["workers-big.sh"]
    assert settings(directory / "submit.sh", "WORKER_SCRIPTS") == ["workers-big.sh"]


def test_jobs_ask_for_what_the_recipe_needs() -> None:
    options = ("learner.processes=8", "learner.device=cuda", "learner.threads=4", POOLS)
    scripts = launch(*options, "--nodes", "2", "--pool", "5", "--grace", "90", "--time", "8:00:00")
    learner = head(scripts / "learner.sh")
    assert {"--nodes=2", "--ntasks-per-node=4", "--gres=gpu:4", "--cpus-per-task=4"} <= set(learner)
    assert settings(scripts / "learner.sh", "RANKS") == ["8"]
    assert {"--array=0-4", "--ntasks=1"} <= set(head(scripts / "workers.sh"))
    assert {"--array=0-2", "--gres=gpu:2"} <= set(head(scripts / "workers-big.sh"))
    assert 'engine.kind="vllm"' in settings(scripts / "workers-big.sh", "ARGUMENTS")
    assert settings(scripts / "submit.sh", "WORKER_SCRIPTS") == ["workers.sh", "workers-big.sh"]
    for script in ("broker.sh", "learner.sh", "workers.sh"):
        assert {"--signal=B:USR1@90", "--requeue", "--time=8:00:00"} <= set(head(scripts / script))


def test_each_scorer_has_a_script_with_its_gpu_and_password() -> None:
    scorers = "scorers={count: 2, device: cuda, threads: 3}"
    scripts = launch("teacher.path=T", "rewards=[{kind: reward_model, path: R}]", scorers, "--sbatch=scorers:--mem=9G")
    named = ["scorer-reward_model.sh", "scorer-teacher.sh"]
    assert settings(scripts / "submit.sh", "WORKER_SCRIPTS") == ["workers.sh", *named]
    for script in named:
        assert {"--array=0-1", "--gres=gpu:1", "--cpus-per-task=3", "--mem=9G"} <= set(head(scripts / script))
        user, file, name = settings(scripts / script, "BROKER_USER", "PASSWORD_FILE", "SCORER")
        assert (user, Path(file).name, f"scorer-{name}.sh") == ("headway-scorer", "scorer", script)
        (line,) = [line for line in (scripts / script).read_text().splitlines() if "-m headway scorers" in line]
        words = [
            "scorers",
            "--count",
            "1",
            "--scorer",
            name,
            "--broker",
            "redis://127.0.0.1:1",
            "--run",
            "x",
            "--dry-run",
        ]
        assert line.endswith('-m headway scorers --count 1 --scorer "$SCORER" "${ARGUMENTS[@]}"')
        assert answer(words) == 0
    launch("teacher.path=T", "scorers.count=0")
    assert not list(scripts.glob("scorer-*.sh"))


def test_an_option_of_sbatch_reaches_all_roles_or_the_one_that_it_names() -> None:
    scripts = launch("--sbatch=--account=a", "--sbatch=learner:--constraint=x&y")
    assert "--account=a" in head(scripts / "broker.sh")
    assert "--constraint=x&y" in head(scripts / "learner.sh")
    assert "--constraint=x&y" not in head(scripts / "workers.sh")


def test_passwords_are_files_for_their_owner_alone_and_in_no_script() -> None:
    scripts = launch()
    folder = scripts / "server" / "passwords"
    passwords = [(folder / role).read_text().strip() for role in Role]
    assert {stat.S_IMODE((folder / role).stat().st_mode) for role in Role} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)} == {0o700}
    texts = "".join(path.read_text() for path in scripts.iterdir() if path.is_file())
    assert len(texts) > 1000
    assert not [password for password in passwords if password in texts]


def test_a_second_launch_keeps_the_passwords_and_leaves_no_pool_that_is_gone() -> None:
    scripts = launch(POOLS)
    before = (scripts / "server" / "passwords" / "worker").read_text()
    launch()
    assert (scripts / "server" / "passwords" / "worker").read_text() == before
    assert not (scripts / "workers-big.sh").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learner.processes=3", "--nodes", "2"], "learner.processes=3 ranks cannot be spread evenly over 2 nodes."),
        (["--pool", "small=2"], "The recipe has no pool 'small', only workers."),
        (["broker.url='redis://h:1'"], "`headway launch slurm` starts a server of its own: leave broker.url out."),
        (["--sbatch", "leaner:--mem=1G"], "--sbatch 'leaner:--mem=1G': give an option such as --partition=gpu"),
        (["learner.step=3"], "unknown key learner.step"),
    ],
)
def test_what_cannot_run_on_a_cluster_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["launch", "slurm", "arithmetic.yaml", *arguments, "--output", "x"]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", ["0", "-1", "few", "x="])
def test_a_number_of_workers_must_be_one(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["launch", "slurm", "arithmetic.yaml", f"--pool={count}", "--output", "x"]) == 2
    assert "give a number of workers from 1 to 10000" in capsys.readouterr().err


def test_the_scripts_are_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "it's a place"
    place.mkdir()
    monkeypatch.chdir(place)
    scripts = sorted(launch(POOLS).glob("*.sh"))
    assert settings(scripts[0], "DIRECTORY") == [str(place / "launch")]
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    said = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout


ROLE = """
import signal, sys, time
def drain(*_):
    print("draining", flush=True)
    sys.exit({code})
signal.signal(signal.SIGTERM, drain)
print("working", *sys.argv[1:], flush=True)
time.sleep({seconds})
"""


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Start a worker's script, with a process in place of Headway's and a `scontrol` that only prints its arguments."""
    scripts = launch()
    (scripts / "address").write_text("127.0.0.1:1\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text('#!/bin/sh\necho scontrol "$@"\n')
    (tools / "scontrol").chmod(0o755)

    def start(*, code: int = 0, seconds: float = 60, grace_s: int = 60) -> "subprocess.Popen[str]":
        role = tools / "role"
        role.write_text(f"#!{sys.executable}\n" + ROLE.format(code=code, seconds=seconds))
        role.chmod(0o755)
        text = (scripts / "workers.sh").read_text()
        text = re.sub(r"^PYTHON=.*$", f"PYTHON={shlex.quote(str(role))}", text, flags=re.M)
        text = re.sub(r"^GRACE_S=.*$", f"GRACE_S={grace_s}", text, flags=re.M)
        slurm = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "PATH": f"{tools}:{os.environ['PATH']}"}
        environment = {**clean_environment(), **slurm}
        return subprocess.Popen(["bash", "-c", text], stdout=subprocess.PIPE, text=True, env=environment)

    return start


def first_line(started: "subprocess.Popen[str]") -> str:
    assert started.stdout is not None
    return started.stdout.readline()


def test_before_the_time_limit_a_job_drains_and_goes_back_into_the_queue(
    job: Callable[..., "subprocess.Popen[str]"],
) -> None:
    started = job()
    assert first_line(started) == "working -m headway workers --count 1 --pool workers-2\n"
    started.send_signal(signal.SIGUSR1)
    said = started.communicate()[0]
    assert said.splitlines()[0] == "draining"
    assert said.splitlines()[-1] == "scontrol requeue 7"
    assert started.returncode == 0


def test_a_job_that_is_to_end_drains_and_does_not_come_back(job: Callable[..., "subprocess.Popen[str]"]) -> None:
    started = job()
    first_line(started)
    started.terminate()
    assert started.communicate()[0] == "draining\n"
    assert started.returncode == 0


def test_a_role_that_does_not_drain_is_killed_and_the_job_goes_back_into_the_queue(
    job: Callable[..., "subprocess.Popen[str]"],
) -> None:
    started = job(code="(time.sleep(60))", grace_s=1)
    first_line(started)
    started.send_signal(signal.SIGUSR1)
    assert started.communicate()[0].splitlines()[-1] == "scontrol requeue 7"


def test_a_job_fails_as_its_role_does(job: Callable[..., "subprocess.Popen[str]"]) -> None:
    started = job(seconds='"no number"')
    assert "requeue" not in started.communicate()[0]
    assert started.returncode == 1


def test_a_server_listens_at_the_address_that_it_is_given(tmp_path: Path) -> None:
    port = free_port()
    with EmbeddedServer(tmp_path, port=port, host="127.0.0.2", has_users=True) as server:
        assert server.url_of(Role.WORKER).startswith(f"redis://headway-worker@127.0.0.2:{port}?")
        password = (tmp_path / "passwords" / "learner").read_text().strip()
        for host in ("127.0.0.1", "127.0.0.2"):
            with redis.Redis(host, port, username="headway-learner", password=password) as client:
                assert client.ping()
        with redis.Redis("127.0.0.2", port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("HEADWAY_TEST_SLURM") != "1", reason="asks for it: HEADWAY_TEST_SLURM=1")
def test_a_run_on_a_cluster_drains_is_queued_again_and_ends(tmp_path: Path) -> None:
    assert not missing_programs()
    scripts = launch(
        "learner.processes=2",
        "learner.steps=12",
        "checkpoint.every_steps=100",
        "stages.sft.phases=[]",
        "evaluation.prompts=0",
        "--pool=1",
        "--grace=60",
    )
    run = tmp_path / "runs" / "arithmetic"
    with cluster(tmp_path / "slurm") as environment:
        environment |= {"HEADWAY_BROKER_HOST": "127.0.0.1"}

        def slurm(*command: str) -> str:
            return subprocess.run(
                command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
            ).stdout

        def until(is_so: Callable[[], bool]) -> None:
            deadline = time.monotonic() + DEADLINE_S
            while not is_so():
                assert time.monotonic() < deadline, slurm("squeue") + logs_of(scripts)
                time.sleep(0.5)

        slurm(str(scripts / "submit.sh"))
        _, learner, workers = (scripts / "jobs.txt").read_text().split()
        until(lambda: len(steps_of(run)) >= 2)
        slurm("scancel", "--batch", "--signal=USR1", learner, workers)  # what Slurm sends before the time limit
        until(lambda: logs_of(scripts).count(DRAINED) == 2)  # learner and worker
        until(lambda: not slurm("squeue", "--noheader").strip())
    assert steps_of(run) == list(range(12))  # the drained learner left a checkpoint, and no step is trained again
    assert json.loads((run / "summary.json").read_text())["trained_twice"] == 0


def steps_of(run: Path) -> list[int]:
    """Return the steps that the run's learners have finished."""
    file = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def logs_of(scripts: Path) -> str:
    return "".join(path.read_text() for path in sorted((scripts / "logs").glob("*.log")))
