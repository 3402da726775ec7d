"""The password of broker.url reaches no file, command line or value in the broker."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headway.broker.connection.address import PASSWORD, PASSWORD_FILE
from headway.broker.errors import LASTING_EXIT, BrokerError, HeadwayError, RefusedByServerError
from headway.broker.server.access import Credentials, Role
from headway.broker.server.embedded import EmbeddedServer
from headway.deploy.launch.broker_server import check_may_work
from headway.deploy.launch.commands import RunStart, WorkerCommand, learner_command
from headway.deploy.recipe.resolve import dump_recipe, load_recipe, recipe_to_bytes
from headway.deploy.roles.run_client import as_learner
from headway.deploy.roles.standalone import run_scorer, run_scorers, run_worker, run_workers
from headway.deploy.run.run_directory import endpoint, prepare
from tests.broker.test_access import admit, url_of
from tests.broker.topologies import LOCAL, ask, free_port, port_of

URL = "redis://ali:sesame@127.0.0.1:6379?db=1"


def test_what_is_written_down(tmp_path: Path) -> None:
    recipe = load_recipe("arithmetic.yaml", [f"broker.url='{URL}'", f"run.directory={tmp_path}"])
    assert recipe.broker.url == URL
    directory = prepare(recipe, resume=False, overwrite=False)
    with endpoint(directory, URL, "r"):
        written = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert {"config.yaml", "broker.json"} <= {path.name for path in written}
        assert not [path for path in written if b"sesame" in path.read_bytes()]
    assert "redis://ali@127.0.0.1:6379?db=1" in dump_recipe(recipe)
    assert b"sesame" not in recipe_to_bytes(recipe)
    for command in (
        learner_command(recipe, directory, URL, RunStart()),
        WorkerCommand(url=URL, run="r", arguments=(), private=tmp_path, logs=tmp_path / "logs", threads=1)(0),
    ):
        assert "sesame" not in " ".join(command.argv)
        assert command.environment["HEADWAY_BROKER"] == URL


def test_a_run_that_was_found_here_is_told_as_its_learner_and_a_given_url_is_taken_as_it_is(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path)
    observer, learner = (credentials.url_of(role, "unix:///s.sock") for role in (Role.OBSERVER, Role.LEARNER))
    assert as_learner(None, observer) == learner
    assert as_learner(None, URL) == URL
    assert as_learner(observer, observer) == observer


@pytest.mark.parametrize(
    ("role", "begin"),
    [
        (Role.WORKER, lambda url, run: run_workers(url, run, 1, ())),
        (Role.SCORER, lambda url, run: run_scorers(url, run, "", 1, ())),
        (Role.SCORER, lambda url, run: run_scorer(url, run, "", "scorer-0", ())),
        (Role.WORKER, lambda url, run: run_worker(url, run, "worker-0", ())),
    ],
)
def test_a_wrong_password_ends_a_pool_before_it_begins_and_a_process_for_good(
    role: Role,
    begin: Callable[[str, str], object],
    server: EmbeddedServer,
    run_name: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = replace(admit(server, None)[role], password="open")
    with pytest.raises(RefusedByServerError, match=r"refuses our user or password .*\?password_file=FILE") as caught:
        begin(url_of(server, wrong), run_name)
    assert caught.value.exit_code == LASTING_EXIT
    assert "logs in" not in capsys.readouterr().out


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    """Return the URL of a server that wants the password `sesame`."""
    with EmbeddedServer(tmp_path / "guarded", port=free_port()) as running:
        ask(running, "ACL", "SETUSER", "ali", "on", ">sesame", "~*", "+@all")
        yield f"redis://ali@{LOCAL}:{port_of(running)}"


@pytest.mark.parametrize("by", ["url", "environment"])
def test_a_process_whose_password_is_a_files_may_log_in_at_another_start(
    by: str, guarded: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stale").write_text("barley")
    url = f"{guarded}?password_file={tmp_path}/stale" if by == "url" else guarded
    if by == "environment":
        monkeypatch.setenv(PASSWORD_FILE, str(tmp_path / "stale"))
    for begin in (lambda: run_scorer(url, run_name, "", "s", ()), lambda: run_worker(url, run_name, "w", ())):
        with pytest.raises(RefusedByServerError, match="refuses our user or password") as caught:
            begin()
        assert caught.value.exit_code == HeadwayError.exit_code
    monkeypatch.setenv(PASSWORD, "barley")
    with pytest.raises(RefusedByServerError) as caught:
        run_worker(guarded, run_name, "w", ())
    assert caught.value.exit_code == LASTING_EXIT


@pytest.mark.parametrize("of_all_runs", [True, False])
def test_a_pool_is_refused_at_once_with_the_url_of_a_role_that_may_not_do_its_work(
    server: EmbeddedServer, run_name: str, of_all_runs: bool
) -> None:
    urls = {role: url_of(server, user) for role, user in admit(server, None if of_all_runs else run_name).items()}
    for role in (Role.OBSERVER, Role.SCORER):
        with pytest.raises(BrokerError, match=r"another run's\? `headway broker` prints .* one of `headway workers`"):
            run_workers(urls[role], run_name, 1, ())
    for role in (Role.WORKER, Role.LEARNER):
        check_may_work(urls[role], run_name, timeout_s=240)
    check_may_work(server.url, run_name, timeout_s=240)
