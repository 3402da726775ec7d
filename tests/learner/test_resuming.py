"""A learner decides where to begin from its checkpoints, its log, and the batches that the broker still has."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.broker import BlockingBroker
from headway.broker.errors import ConfigError
from headway.broker.schema import Claim, Owner, RunRules, WeightVersion
from headway.learner.checkpoint import CheckpointError, CheckpointStore
from headway.learner.data.prompts.cursor import PromptCursor
from headway.learner.experience.log import ExperienceLog, Rewind
from headway.learner.ranks import Ranks
from headway.learner.stages.starting_point import Origin, RunClaim, choose_origin, claim_run, identify, open_log
from tests.learner.batches import batch

RANKS = Ranks(0, 1, 0, 1, True)
LOGGED = 6
CURSOR = cast(PromptCursor, SimpleNamespace(watermark="", trained_beyond=()))


@dataclass
class Server:
    """A broker that answers claims with the marks that it `has`, and keeps the learner's own."""

    has: Claim
    told: dict[str, Any] = field(default_factory=dict)
    joined: str = ""

    @property
    def broker(self) -> "Server":
        return self

    @property
    def batches(self) -> "Server":
        return self

    def call(self, answer: Any) -> Any:
        return answer

    def join(self) -> str:
        return self.joined

    def claim(self, **told: Any) -> Claim:
        self.told = told
        return self.has


def claim(announced: int | None, **changes: Any) -> Claim:
    return Claim(Owner(4, "token"), "run", announced, **changes)


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointStore:
    """Return checkpoints at steps 2 and 4."""
    for step in (2, 4):
        directory = tmp_path / "checkpoints" / "1" / f"step_{step}"
        directory.mkdir(parents=True)
        (directory / "learner.json").write_text(f'{{"identity": "run", "incarnation": 1, "step": {step}}}')
        (directory / "files.json").write_text("{}")
    return CheckpointStore(tmp_path / "checkpoints", keep=9)


@pytest.fixture
def log(tmp_path: Path) -> ExperienceLog:
    opened = ExperienceLog(tmp_path / "experience", 1 << 20)
    for step in range(LOGGED):
        opened.record(step, batch(step))
    return opened


def origin_of(checkpoints: CheckpointStore, *, resume: bool = True, rewind: Rewind | None = None) -> Origin:
    return choose_origin(checkpoints, lambda _: None, RANKS, resume=resume, rewind=rewind)


def begin(server: Server, origin: Origin, log: ExperienceLog) -> RunClaim:
    return claim_run(
        cast(BlockingBroker, server),
        origin,
        log,
        CURSOR,
        identity="run",
        last_incarnation=3,
        rules=RunRules(groups_per_step=1, max_lag=0),
        config=b"",
    )


def test_it_goes_on_at_the_newest_checkpoint_that_loads(checkpoints: CheckpointStore) -> None:
    def load(path: Path) -> None:
        if path.name == "step_4":
            raise CheckpointError("damaged")

    newest, older = origin_of(checkpoints), choose_origin(checkpoints, load, RANKS, resume=True, rewind=None)
    assert (newest.step, newest.is_branch) == (4, False)
    assert (older.step, older.is_branch) == (2, True)
    assert origin_of(checkpoints, resume=False).checkpoint is None


@pytest.mark.parametrize("file", ["files.json", "learner.json"])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(checkpoints: CheckpointStore, file: str) -> None:
    for step in (2, 4):
        (checkpoints.path(1, step) / file).unlink()
    with pytest.raises(CheckpointError, match=f"step_4 is not whole: .*{file}.* No other checkpoint is whole"):
        origin_of(checkpoints)
    shutil.rmtree(checkpoints.path(1, 2))
    with pytest.raises(CheckpointError, match="step_4"):
        origin_of(checkpoints)
    shutil.rmtree(checkpoints.path(1, 4))
    assert origin_of(checkpoints).checkpoint is None, "a run that ended before its first checkpoint"


def test_what_the_broker_settled_is_replayed_from_the_log(checkpoints: CheckpointStore, log: ExperienceLog) -> None:
    server = Server(claim(5, committed_step=5))
    begun = begin(server, origin_of(checkpoints), log)
    assert begun.replayed == range(4, LOGGED)
    assert (begun.start.version, begun.start.caught_up_at) == (WeightVersion(4, 4), 5)
    assert (server.told["checkpoint"].incarnation, server.told["replayable_to"]) == (3, LOGGED)


def test_what_the_broker_still_holds_is_not_replayed(checkpoints: CheckpointStore, log: ExperienceLog) -> None:
    begun = begin(Server(claim(5, committed_step=4)), origin_of(checkpoints), log)
    assert (begun.replayed, begun.start.caught_up_at) == (range(0), 5)


def test_a_server_that_knows_nothing_is_caught_up_with_the_log(
    checkpoints: CheckpointStore, log: ExperienceLog
) -> None:
    begun = begin(Server(claim(None)), origin_of(checkpoints), log)
    assert (begun.replayed, begun.start.caught_up_at) == (range(4, LOGGED), LOGGED)


@pytest.mark.parametrize("by", ["user", "server"])
def test_what_is_generated_anew_leaves_the_log(by: str, checkpoints: CheckpointStore, log: ExperienceLog) -> None:
    rewind = Rewind(step=4, regenerate=True) if by == "user" else None
    begun = begin(Server(claim(5, is_rewound=by == "server")), origin_of(checkpoints, rewind=rewind), log)
    assert (begun.replayed, begun.start.caught_up_at, begun.start.is_branch) == (range(0), 0, True)
    assert log.held_until(0) == 4


def test_a_checkpoint_of_another_run_is_refused(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    server, origin = cast(BlockingBroker, Server(claim(None), joined="remembered")), origin_of(checkpoints)
    with pytest.raises(ConfigError, match=r"of another run \(identity run\)"):
        identify(server, origin, tmp_path, "other")
    assert identify(server, origin, tmp_path, "") == "run"
    nothing_yet = origin_of(CheckpointStore(tmp_path / "none", keep=1))
    assert identify(server, nothing_yet, tmp_path, "") == "remembered"


def test_a_run_that_starts_empties_the_log(checkpoints: CheckpointStore, log: ExperienceLog, tmp_path: Path) -> None:
    assert open_log(origin_of(checkpoints), checkpoints, tmp_path / "experience", 1 << 20, "").held_until(0) == LOGGED
    anew = origin_of(checkpoints, resume=False)
    assert open_log(anew, checkpoints, tmp_path / "experience", 1 << 20, "").held_until(0) == 0
