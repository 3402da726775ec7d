"""Real child processes live, die, drain and hang: the supervisor loses sight of none and leaves none behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from headway.broker.errors import BUG_EXIT, LASTING_EXIT, SIGNALLED_EXIT, UNHEALTHY_EXIT, VERSION_EXIT, HeadwayError
from headway.deploy.launch.base import DRAIN_NOTICE, Command
from headway.deploy.launch.local_launcher import Child, guarded
from headway.deploy.launch.process_pool import Pool
from headway.deploy.launch.supervisor import RoleFailedError, Supervisor
from headway.rollout_workers.health import Verdict
from tests.processes import children_left

FOREVER = "import time\nwhile True: time.sleep(0.05)"
DEADLINE_S = 240.0


def role(name: str, script: str, directory: Path, *, relay: bool = False) -> Command:
    log = directory / "logs" / f"{name}.log"
    return Command(name=name, argv=(sys.executable, "-c", script), log=log, cwd=directory, relay=relay)


def drains(name: str, *, then: str = "sys.exit(0)") -> str:
    """Return a script that runs until SIGTERM, then writes down when it ended."""
    return (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        f"    time.sleep(0.2); pathlib.Path('{name}.ended').write_text(repr(time.monotonic())); {then}\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"pathlib.Path('{name}.up').touch()\n"
        "while True: time.sleep(0.05)\n"
    )


def once_up(directory: Path, names: list[str], *signals: signal.Signals) -> threading.Thread:
    """Once all of them have written NAME.up, send this process the signals, a moment apart."""

    def send() -> None:
        await_files(*(directory / f"{name}.up" for name in names))
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def await_files(*paths: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"waited in vain for {paths}"
        time.sleep(0.02)


def await_end(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_the_learners_end_ends_the_run_and_workers_are_asked_to_stop(tmp_path: Path) -> None:
    said: list[str] = []
    until_up = "import pathlib, time\nwhile not pathlib.Path('w.up').exists(): time.sleep(0.05)"
    learner = role("learner", until_up, tmp_path)
    code = Supervisor([Pool.of([role("w", drains("w"), tmp_path)])], learner, say=said.append).run()
    assert code == 0
    assert (tmp_path / "w.ended").exists()
    assert said == ["Stopping 1 worker: leases go back to the broker."]
    assert children_left() == []


def test_a_worker_that_dies_is_restarted_and_its_error_told(tmp_path: Path) -> None:
    dies_twice = (
        "import pathlib, sys, time\n"
        "tries = pathlib.Path('tries'); tries.touch(); tries.write_text(tries.read_text() + 'x')\n"
        "if len(tries.read_text()) < 3:\n"
        "    print('a line of its log'); print('Error: no luck today.', file=sys.stderr); sys.exit(1)\n"
        "pathlib.Path('lives').touch()\n" + FOREVER
    )
    learner = "import pathlib, time\nwhile not pathlib.Path('lives').exists(): time.sleep(0.05)"
    said: list[str] = []
    supervisor = Supervisor(
        [Pool.of([role("worker-0", dies_twice, tmp_path)])],
        role("learner", learner, tmp_path),
        backoff_s=0.05,
        say=said.append,
    )
    assert supervisor.run() == 0
    assert supervisor.restarts == 2
    log = tmp_path / "logs" / "worker-0.log"
    assert said[0] == (f"worker-0 exited with code 1: no luck today.\nRestarting it in 0.05 s (1 of 5). Its log: {log}")
    assert "Restarting it in 0.1 s (2 of 5)." in said[1]


def test_a_worker_that_keeps_failing_stops_the_run_with_its_own_last_error(tmp_path: Path) -> None:
    failing = role("worker-0", "import sys; sys.exit('Error: the engine is not there. Install it.')", tmp_path)
    supervisor = Supervisor(
        [Pool.of([failing])], role("learner", FOREVER, tmp_path), max_restarts=2, backoff_s=0.05, say=lambda _: None
    )
    with pytest.raises(RoleFailedError) as caught:
        supervisor.run()
    assert str(caught.value).startswith("worker-0 exited with code 1: the engine is not there. Install it.\n")
    assert f"after 2 restarts: the run has been stopped. Its log: {failing.log}" in str(caught.value)
    assert supervisor.restarts == 2
    assert children_left() == []


LEAVES = (
    "import os, sys; sys.path.insert(0, {root!r})\n"
    "from headway.deploy.launch.base import write_exit_notice\n{work}\nwrite_exit_notice()"
)


def says_farewell(name: str, work: str, directory: Path) -> Command:
    """Return the script of a role that writes its exit notice when it has done its work."""
    script = LEAVES.format(root=os.getcwd(), work=work)
    return replace(role(name, script, directory), exit_notice=directory / f"{name}.exit_notice")


@pytest.mark.parametrize("leaves", ["sys.exit(0)", "os._exit(0)"])
def test_a_worker_that_leaves_without_a_farewell_has_failed(tmp_path: Path, leaves: str) -> None:
    said: list[str] = []
    worker = says_farewell("worker-0", f"print('in a reward'); {leaves}", tmp_path)
    supervisor = Supervisor([Pool.of([worker])], role("learner", FOREVER, tmp_path), 1, backoff_s=0.05, say=said.append)
    with pytest.raises(RoleFailedError, match=r"^worker-0 exited with code 0 in the midst of its work .*sys\.exit"):
        supervisor.run()
    assert supervisor.restarts == len(said) == 1
    with pytest.raises(RoleFailedError, match="again after 1 restarts: the workers of this command"):
        Supervisor([Pool.of([worker])], max_restarts=1, backoff_s=0.05, say=said.append).run()


def test_a_worker_that_says_farewell_has_left(tmp_path: Path) -> None:
    once = "tried = os.path.exists('tried'); open('tried', 'w'); tried or os._exit(0)"
    supervisor = Supervisor([Pool.of([says_farewell("w", once, tmp_path)])], backoff_s=0.05, say=lambda _: None)
    assert (supervisor.run(), supervisor.restarts) == (0, 1)
    supervisor = Supervisor(
        [Pool.of([says_farewell("w", "os._exit(0)", tmp_path)])], max_restarts=0, say=lambda _: None
    )
    with pytest.raises(RoleFailedError):  # the exit_notice of the process before it does not count
        supervisor.run()


def test_a_learner_that_leaves_without_a_farewell_has_failed(tmp_path: Path) -> None:
    for work, code in (("pass", 0), ("os._exit(0)", None)):
        supervisor = Supervisor([], says_farewell("learner", work, tmp_path), say=lambda _: None)
        if code is not None:
            assert supervisor.run() == code
            continue
        with pytest.raises(RoleFailedError, match="learner exited with code 0 in the midst of its work"):
            supervisor.run()


def test_a_worker_whose_error_is_a_lasting_one_is_not_started_again(tmp_path: Path) -> None:
    words = f"import sys; print('Error: reward mine:score hangs.', flush=True); sys.exit({LASTING_EXIT})"
    supervisor = Supervisor(
        [Pool.of([role("w", words, tmp_path)])], role("learner", FOREVER, tmp_path), say=lambda _: None
    )
    with pytest.raises(RoleFailedError, match=r"reward mine:score hangs\.\nAnother start would not mend it"):
        supervisor.run()
    assert supervisor.restarts == 0
    assert children_left() == []


@pytest.mark.parametrize(("place", "restarts"), [("'the same'", 1), ("time.time()", 2)])
def test_a_bug_that_comes_again_with_the_same_words_ends_the_run(tmp_path: Path, place: str, restarts: int) -> None:
    """The file of its traceback has another name each time. Bugs with other words are tried as often as all else."""
    words = "'Error: This is a bug in Headway, not a mistake of yours: KeyError: %s. The traceback is in /tmp/%s.log.'"
    source = f"import sys, time; print({words} % ({place}, time.time()), flush=True); sys.exit({BUG_EXIT})"
    pool = Pool.of([role("w", source, tmp_path)])
    supervisor = Supervisor(
        [pool], role("learner", FOREVER, tmp_path), max_restarts=2, backoff_s=0.02, say=lambda _: None
    )
    with pytest.raises(RoleFailedError, match="This is a bug in Headway"):
        supervisor.run()
    assert supervisor.restarts == restarts


OTHER_VERSION = f"import sys; print('Error: protocol 1, not 2.', flush=True); sys.exit({VERSION_EXIT})"


def test_a_worker_of_another_version_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    said, over = list[str](), tmp_path / "over"
    learner = role("learner", f"import os, time\nwhile not os.path.exists({str(over)!r}): time.sleep(0.02)", tmp_path)
    other = role("other", f"{OTHER_VERSION}", tmp_path)
    pool = Pool.of([role("w0", drains("w0"), tmp_path), other])
    supervisor = Supervisor([pool], learner, backoff_s=0.01, say=said.append)

    def look() -> None:
        await_files(tmp_path / "w0.up")
        deadline = time.monotonic() + DEADLINE_S
        while pool.info().given_up == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert (pool.info().running, pool.info().restarting) == (1, 0)
        time.sleep(0.3)  # time in which a wrong restart would happen
        over.touch()

    thread = threading.Thread(target=look)
    thread.start()
    assert supervisor.run() == 0
    thread.join()
    assert supervisor.restarts == 0
    assert (tmp_path / "w0.ended").exists()
    assert said[0].startswith("other exited with code 79: protocol 1, not 2.\nRestarting it cannot mend this.")


UNHEALTHY = f"import sys; print('Error: the engine hangs.', flush=True); sys.exit({UNHEALTHY_EXIT})"


def test_a_sick_worker_is_replaced_as_long_as_others_are_well(tmp_path: Path) -> None:
    """The pauses grow longer, and a message names a remedy where restarts of other kinds would have come to an end."""
    said, over = list[str](), tmp_path / "over"
    learner = role("learner", f"import os, time\nwhile not os.path.exists({str(over)!r}): time.sleep(0.02)", tmp_path)
    unhealthy = f"import os, time\nwhile not os.path.exists('w0.up'): time.sleep(0.02)\n{UNHEALTHY}"
    pool = Pool.of([role("w0", drains("w0"), tmp_path), role("w1", unhealthy, tmp_path)])

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            over.touch()

    assert Supervisor([pool], learner, max_restarts=2, backoff_s=0.02, say=say).run() == 0
    assert (tmp_path / "w0.ended").exists()
    assert said[0].startswith("w1 exited with code 80: the engine hangs.\nAnother process takes its place in 0.02 s.")
    assert "in 0.04 s." in said[1]
    assert "in 0.08 s. 3 processes in a row were set aside" in said[2]
    assert "headway scale -1" in said[2]


def test_a_worker_on_which_there_is_a_verdict_drains_and_another_takes_its_place(tmp_path: Path) -> None:
    said, over = list[str](), tmp_path / "over"
    learner = role("learner", f"import os, time\nwhile not os.path.exists({str(over)!r}): time.sleep(0.02)", tmp_path)
    pool = Pool.of([role(name, drains(name), tmp_path) for name in ("w0", "w1")])

    def judge() -> None:
        await_files(tmp_path / "w0.up", tmp_path / "w1.up")
        (tmp_path / "w1.up").unlink()
        first, tag = pool.slots[1].child, pool.slots[1].tag
        pool.slots[1].verdict = Verdict("slow", "it generates 1 token/s")
        await_files(tmp_path / "w1.ended", tmp_path / "w1.up")
        assert pool.slots[1].child is not first
        assert pool.slots[1].tag != tag
        over.touch()

    thread = threading.Thread(target=judge)
    thread.start()
    assert Supervisor([pool], learner, backoff_s=0.02, say=said.append).run() == 0
    thread.join()
    assert said[0] == ("w1 was set aside (slow): it generates 1 token/s.\nAnother process takes its place in 0.02 s.")
    assert pool.departed == 0
    assert children_left() == []


def test_workers_that_are_all_sick_stop_the_run(tmp_path: Path) -> None:
    workers = [role(name, UNHEALTHY, tmp_path) for name in ("w0", "w1")]
    supervisor = Supervisor(
        [Pool.of(workers)], role("learner", FOREVER, tmp_path), max_restarts=2, backoff_s=0.02, say=lambda _: None
    )
    with pytest.raises(RoleFailedError, match=r"the engine hangs\.\nIt failed again after 2 restarts: the run has"):
        supervisor.run()
    assert supervisor.restarts <= 8
    assert children_left() == []


def test_workers_that_are_all_of_another_version_end_with_that_code(tmp_path: Path) -> None:
    workers = [role(name, OTHER_VERSION, tmp_path) for name in ("w0", "w1")]
    with pytest.raises(RoleFailedError, match=r"protocol 1, not 2\.\nNo worker is left") as caught:
        Supervisor([Pool.of(workers)], say=lambda _: None).run()
    assert caught.value.exit_code == VERSION_EXIT
    assert children_left() == []


def test_a_learner_that_dies_stops_the_run_with_the_end_of_its_log(tmp_path: Path) -> None:
    script = "import os, signal\nprint('step 3', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RoleFailedError, match=r"^learner was killed by SIGKILL: step 3\nThe run has been stopped\."):
        Supervisor(
            [Pool.of([role("w", FOREVER, tmp_path)])], role("learner", script, tmp_path), say=lambda _: None
        ).run()
    assert children_left() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_drains_the_learner_then_the_workers(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    said: list[str] = []
    thread = once_up(tmp_path, ["learner", "w0", "w1"], number)
    workers = [role(name, drains(name), tmp_path) for name in ("w0", "w1")]
    assert Supervisor([Pool.of(workers)], role("learner", drains("learner"), tmp_path), say=said.append).run() == code
    thread.join()
    ended = {name: float((tmp_path / f"{name}.ended").read_text()) for name in ("learner", "w0", "w1")}
    assert ended["learner"] < min(ended["w0"], ended["w1"])
    assert said == [
        f"Stopping: {DRAIN_NOTICE}, if it trains already. Ctrl-C again stops at once.",
        "Stopping 2 workers: leases go back to the broker.",
    ]


def test_other_processes_are_looked_after_while_the_learner_stops(tmp_path: Path) -> None:
    said: list[str] = []

    def check() -> None:
        if said:
            (tmp_path / "checked").touch()
            raise HeadwayError("The server keeps dying.")

    is_checked = "pathlib.Path('checked').exists()"
    then = f"[time.sleep(0.05) for _ in range(600) if not {is_checked}]; time.sleep(0.5); sys.exit(not {is_checked})"
    thread = once_up(tmp_path, ["learner"], signal.SIGINT)
    learner = role("learner", drains("learner", then=then), tmp_path)
    assert Supervisor([], learner, say=said.append, check=check).run() == 130
    thread.join()
    assert said[0].startswith("Stopping: ")
    assert said[1:] == ["The server keeps dying."]


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    said: list[str] = []
    thread = once_up(tmp_path, ["learner", "w0"], signal.SIGINT, signal.SIGINT)
    deaf = drains("learner", then="time.sleep(3600)")
    code = Supervisor(
        [Pool.of([role("w0", drains("w0"), tmp_path)])], role("learner", deaf, tmp_path), say=said.append
    ).run()
    thread.join()
    assert code == 130
    assert said[-1].startswith("Stopped at once.")
    assert not (tmp_path / "w0.ended").exists()
    assert children_left() == []


def test_a_drain_that_fails_is_a_failure(tmp_path: Path) -> None:
    thread = once_up(tmp_path, ["learner"], signal.SIGINT)
    fails = drains("learner", then="sys.exit('Error: the disk is full.')")
    with pytest.raises(RoleFailedError, match=r"learner exited with code 1: the disk is full\."):
        Supervisor([], role("learner", fails, tmp_path), say=lambda _: None).run()
    thread.join()


def test_a_stopped_warm_up_is_no_failure(tmp_path: Path) -> None:
    thread = once_up(tmp_path, ["sft"], signal.SIGINT)
    warm_up = role("sft", drains("sft", then="sys.exit('Error: stopped before its end.')"), tmp_path)
    assert Supervisor([], warm_up, fails_when_stopped=True, say=lambda _: None).run() == 130
    thread.join()


def test_without_a_learner_it_ends_when_all_workers_have_left(tmp_path: Path) -> None:
    assert Supervisor([Pool.of([role(name, "pass", tmp_path) for name in ("a", "b")])], say=lambda _: None).run() == 0


@pytest.mark.parametrize(("then", "code"), [("sys.exit(0)", 0), ("sys.exit(1)", 143)])
def test_without_a_learner_it_is_done_when_all_workers_have_left_as_asked(tmp_path: Path, then: str, code: int) -> None:
    thread = once_up(tmp_path, ["a", "b"], signal.SIGTERM)
    workers = [role("a", drains("a"), tmp_path), role("b", drains("b", then=then), tmp_path)]
    assert Supervisor([Pool.of(workers)], say=lambda _: None).run() == code
    thread.join()


def leaves(name: str) -> str:
    """Return the script of a worker that writes its process id down, and hands its work back at a signal."""
    return (
        "import os, pathlib, signal, sys, time\n"
        "def end(*_):\n"
        "    for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
        f"    sys.exit({SIGNALLED_EXIT})\n"
        "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, end)\n"
        f"pathlib.Path('{name}.new').write_text(str(os.getpid()))\n"
        f"os.replace('{name}.new', '{name}.up')\n" + FOREVER
    )


def pid_in(path: Path) -> int:
    await_files(path)
    return int(path.read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP])
def test_a_worker_that_another_process_ends_by_a_signal_is_replaced(tmp_path: Path, number: signal.Signals) -> None:
    def kill_it_once() -> None:
        os.kill(first := pid_in(tmp_path / "w.up"), number)
        while pid_in(tmp_path / "w.up") == first:
            time.sleep(0.02)
        (tmp_path / "over").touch()

    thread = threading.Thread(target=kill_it_once)
    thread.start()
    learner = "import pathlib, time\nwhile not pathlib.Path('over').exists(): time.sleep(0.05)"
    pool, said = Pool.of([role("w", leaves("w"), tmp_path)]), list[str]()
    supervisor = Supervisor([pool], role("learner", learner, tmp_path), backoff_s=0.05, say=said.append)
    assert supervisor.run() == 0
    thread.join()
    assert (supervisor.restarts, pool.departed, pool.info().restarts) == (1, 0, 1)
    assert "(1 of 5)" in said[0]
    has_handed_back = number in (signal.SIGTERM, signal.SIGINT)
    assert len(pool.dead) == (0 if has_handed_back else 1)


@pytest.mark.parametrize("is_before", [True, False])
def test_a_signal_to_the_whole_group_ends_workers_and_supervisor_cleanly(tmp_path: Path, is_before: bool) -> None:
    """As systemd and Slurm send it: a worker gets it beside its supervisor, or before it."""
    names, said = ["w0", "w1", "w2"], list[str]()

    def send() -> None:
        first, *others = [pid_in(tmp_path / f"{name}.up") for name in names]
        os.kill(first, signal.SIGTERM)
        while is_before and not said:
            time.sleep(0.02)
        for pid in (*others, os.getpid()):
            os.kill(pid, signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    pool = Pool.of([role(name, leaves(name), tmp_path) for name in names])
    assert Supervisor([pool], backoff_s=1000.0, say=said.append).run() == 0
    thread.join()
    assert children_left() == []
    assert not pool.dead


def test_a_relayed_stop_reaches_the_children_and_not_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(drains("rank"))
    launcher = (
        "import signal, subprocess, sys, time, pathlib\n"
        "def told(*_): pathlib.Path('told').touch()\n"
        "signal.signal(signal.SIGTERM, told)\n"
        "sys.exit(subprocess.run([sys.executable, 'rank.py']).returncode)"
    )
    thread = once_up(tmp_path, ["rank"], signal.SIGTERM)
    command = role("learner", launcher, tmp_path, relay=True)
    assert Supervisor([], command, say=lambda _: None).run() == 143
    thread.join()
    assert (tmp_path / "rank.ended").exists()
    assert not (tmp_path / "told").exists()


def test_nothing_survives_a_killed_supervisor(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from headway.deploy.launch.base import Command
from headway.deploy.launch.process_pool import Pool
from headway.deploy.launch.local_launcher import guarded
from headway.deploy.launch.supervisor import Supervisor
import subprocess
server = subprocess.Popen([sys.executable, "-c", {FOREVER!r}], start_new_session=True)
Path("server.pid").write_text(str(server.pid))
child = "import os, pathlib; pathlib.Path('NAME.pid').write_text(str(os.getpid()))\\n" + {FOREVER!r}
argv = (sys.executable, "-c")
roles = [Command(name=n, argv=(*argv, child.replace("NAME", n)), log=Path(n + ".log")) for n in "ab"]
with guarded(server.pid):
    Path("guarded.pid").write_text(str(server.pid))
    Supervisor([Pool.of(roles[1:])], roles[0]).run()
"""
    supervisor = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    pid_files = [tmp_path / f"{name}.pid" for name in ("a", "b", "server", "guarded")]
    await_files(*pid_files)
    time.sleep(0.5)  # until the guard is at its post and the files are written
    supervisor.kill()
    supervisor.wait()
    for file in pid_files:
        await_end(int(file.read_text()))


def test_a_guard_leaves_with_its_context(tmp_path: Path) -> None:
    victim = subprocess.Popen([sys.executable, "-c", FOREVER])
    with guarded(victim.pid):
        pass
    assert victim.poll() is None
    victim.kill()
    victim.wait()


def test_killing_a_child_takes_what_it_started_along(tmp_path: Path) -> None:
    script = (
        "import pathlib, subprocess, sys, time\n"
        f"grandchild = subprocess.Popen([sys.executable, '-c', {FOREVER!r}])\n"
        "pathlib.Path('pid.part').write_text(str(grandchild.pid)); pathlib.Path('pid.part').rename('pid')\n" + FOREVER
    )
    child = Child(role("w", script, tmp_path))
    await_files(tmp_path / "pid")
    child.kill()
    await_end(int((tmp_path / "pid").read_text()))
    assert child.exit_code() == -signal.SIGKILL


def test_last_words_are_of_the_last_start_only(tmp_path: Path) -> None:
    for script, words in (
        ("print('Error: old')", "old"),
        ("print('new')", "new"),
        ("pass", "it printed nothing"),
    ):
        child = Child(role("w", script, tmp_path))
        child._process.wait()
        assert child.last_words() == words


TORCHRUNS_REPORT = """
W1121 12:33:56.028000 12883 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 12982 closing
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


@pytest.mark.parametrize(
    "report", [TORCHRUNS_REPORT, "\n\nmore", "\n12:33:56 step 4", "\nTraceback (most recent call last):\n  x"]
)
def test_last_words_end_with_the_errors_paragraph(tmp_path: Path, report: str) -> None:
    child = Child(role("w", f"print('a log\\nError: no luck.\\nIts log: x' + {report!r})", tmp_path))
    child._process.wait()
    assert child.last_words() == "no luck.\nIts log: x"


def test_children_see_the_import_path_and_their_own_directory(tmp_path: Path) -> None:
    shown = "os.getcwd(), os.environ['HEADWAY_IMPORT_PATH'], '' in sys.path, os.environ['X']"
    script = f"import os, sys; print({shown})"
    command = Command(
        name="w",
        argv=(sys.executable, "-c", script),
        log=tmp_path / "log",
        cwd=tmp_path,
        environment={"X": "1"},
    )
    child = Child(command)
    child._process.wait()
    assert child.last_words() == f"{tmp_path} {os.environ.get('HEADWAY_IMPORT_PATH', os.getcwd())} False 1"
