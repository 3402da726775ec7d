"""The chaos benchmark: the product passes a short trial, the audit finds every fault, protections can be removed."""

import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from benchmarks.chaos import witness as witness_module
from benchmarks.chaos.audit import MUST_BE_ZERO, Audit, Beginning, Lineage, StepRecord, Trail, Trained, audit
from benchmarks.chaos.faults import Faults
from benchmarks.chaos.network import flood, listening_ports
from benchmarks.chaos.outcome import Outcome
from benchmarks.chaos.pills import HOSTILE, PILLS, Hostile, is_pill
from benchmarks.chaos.protections import PROTECTIONS, take_out
from benchmarks.chaos.server import Disk, no_file_grows
from benchmarks.chaos.tasks import (
    OF_ANOTHER_RUN,
    OVERWRITTEN_WEIGHTS,
    WEIGHTS,
    logprobs_of,
    response_length,
    response_tokens,
    what_is_wrong,
)
from benchmarks.chaos.trial import GROUP_SIZE, MAX_LAG
from benchmarks.chaos.user_code import text_of
from benchmarks.chaos.witness import Witness, fate_of
from headway.broker import Broker
from headway.broker.client.learner import CheckpointMark
from headway.broker.client.leases import SubmitOutcome
from headway.broker.connection import function_library
from headway.broker.keys import Keys
from headway.broker.schema import Prompt, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from headway.learner.data.prompts.cursor import group_at
from tests.broker.scenario import begin, rules

STEPS = 6
"""The number of steps of the trails below; step k trains group k."""
WRITER = """
import sys
while True:
    try:
        with open(sys.argv[1], "ab") as file:
            file.write(b"x")
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
    sys.stdin.readline()
"""
EVENTFUL = 18669
"""A seed of a trial in which much happens within two seconds, while workers take part in broadcasts.

It kills a worker, the server and the learner, wakes a leftover, sends a pill and floods.
"""
SPANS = (VersionSpan(0, 5, WeightVersion(1, 3)),)
FIRST_WEIGHTS = Beginning()
CLEAN = dict.fromkeys(MUST_BE_ZERO, 0)


def test_faults_strike_on_until_each_has_hit_something_and_a_trial_tells_which_did_not() -> None:
    mean_s = dict.fromkeys(("kill learner", "kill worker", "kill server", "cut link", "flood"), 1.0)
    scene: Any = SimpleNamespace(learner=None, workers=[], scorers=[], links={}, server=None, witness=None)
    faults = Faults(0, mean_s, scene)
    assert faults.unmet() == ["learner", "server", "worker", "cut link", "flood"]
    faults.effective.update(("worker", "server"))
    faults.others["floods"] += 1
    assert faults.unmet() == ["learner", "cut link"]
    outcome: Any = SimpleNamespace(finished=True, shows=(), missing=("effective kills: learner",))
    assert Outcome.is_clean.fget(outcome)  # type: ignore[attr-defined]
    outcome.shows = ("lost",)
    assert not Outcome.is_clean.fget(outcome)  # type: ignore[attr-defined]


def test_a_short_trial_loses_nothing() -> None:
    """The trial runs in a process of its own, because it leaves behind the server that forks its workers."""
    command = [sys.executable, "-m", "benchmarks.chaos", "--seed", str(EVENTFUL), "--minutes", "0.1"]
    trial = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert trial.returncode == 0, trial.stdout + trial.stderr
    outcome = json.loads(trial.stdout.splitlines()[-1])
    assert outcome.items() >= CLEAN.items()
    assert outcome["kills"].keys() >= {"learner", "server", "worker"}
    assert outcome["broadcasts"]
    assert min(outcome["leftovers"], outcome["floods"], outcome["forgotten_renewals"]) > 0
    assert min(outcome["held_by_killed"]["worker"], outcome["expired_leases"]) > 0
    assert outcome["received_by_replacements"] > 0
    assert outcome["vitals"].keys() == {"learner", "scorer", "server", "worker"}


def test_steps_of_an_abandoned_branch_do_not_count(tmp_path: Path) -> None:
    leave_trail(tmp_path, "first", [step(k) for k in range(STEPS)])
    leave_trail(tmp_path, "second", [step(k) for k in range(3, STEPS)], Beginning("first", 3))
    assert counts(tmp_path, "second") == CLEAN


def test_what_nobody_trained_is_lost(tmp_path: Path) -> None:
    leave_trail(tmp_path, "first", [step(k, samples=range(GROUP_SIZE - (k == 3))) for k in range(STEPS)])
    assert counts(tmp_path, "first") == {**CLEAN, "lost": 1}


def test_a_sample_is_trained_twice_in_whatever_round(tmp_path: Path) -> None:
    leave_trail(tmp_path, "first", [*(step(k) for k in range(STEPS)), step(STEPS, group=2, round_=1)])
    assert counts(tmp_path, "first", STEPS + 1) == {**CLEAN, "trained_twice": GROUP_SIZE}


def test_one_old_token_is_over_the_bound(tmp_path: Path) -> None:
    old = step(5, lag=MAX_LAG + 1)
    leave_trail(tmp_path, "first", [*(step(k, lag=min(k, MAX_LAG)) for k in range(5)), old])
    assert counts(tmp_path, "first") == {**CLEAN, "over_lag_bound": GROUP_SIZE}


def test_tokens_of_weights_that_the_lineage_never_had(tmp_path: Path) -> None:
    leave_trail(tmp_path, "first", [step(k) for k in range(STEPS)])
    others = [step(k, incarnation=2, digest=f"other {k}", lag=1) for k in range(4, STEPS)]
    leave_trail(tmp_path, "second", [step(3, incarnation=2), *others], Beginning("first", 3))
    assert counts(tmp_path, "second") == {**CLEAN, "off_lineage": GROUP_SIZE}


def test_tokens_of_weights_that_nobody_trained_from_before_they_were_abandoned(tmp_path: Path) -> None:
    published = StepRecord(WeightVersion(1, 4), "weights 4", ())
    leave_trail(tmp_path, "first", [*(step(k) for k in range(4)), published])
    others = [step(4, incarnation=2, digest="other 4"), step(5, incarnation=2, lag=2)]
    leave_trail(tmp_path, "second", [step(3, incarnation=2), *others], Beginning("first", 3))
    assert counts(tmp_path, "second") == {**CLEAN, "off_lineage": GROUP_SIZE}


def test_no_token_is_newer_than_the_step_that_trains_it(tmp_path: Path) -> None:
    leave_trail(tmp_path, "first", [step(k, lag=-(k == 3)) for k in range(STEPS)])
    assert counts(tmp_path, "first") == {**CLEAN, "off_lineage": GROUP_SIZE}


def test_a_lease_or_weights_of_another_run_are_off_identity(tmp_path: Path) -> None:
    of_another = Trained(f"{group_at((0, 3))}:0:0", SPANS, 0, "", "f" * 16)
    by_its_weights = Trained(f"{group_at((0, 3))}:0:1", SPANS, 0, OF_ANOTHER_RUN)
    assert counts_with(tmp_path, of_another, by_its_weights) == {**CLEAN, "off_identity": 2}


def test_a_pill_is_poison_and_no_damage(tmp_path: Path) -> None:
    pill = Trained(f"{group_at((0, 3))}:0:0", SPANS, 0, "300 tokens where 20 were generated", is_pill=True)
    assert counts_with(tmp_path, pill) == {**CLEAN, "poisoned": 1}


@pytest.mark.parametrize("kind", PILLS)
def test_every_pill_is_told_from_an_honest_sample(kind: str) -> None:
    """The audit knows a pill by its author; one whose segments another worker may continue has a different content
    too."""
    prompt, honest = generated(TrajectoryId(group_at((0, 7)), 0, 1))
    pill = PILLS[kind](msgspec.structs.replace(honest, worker=f"{HOSTILE}-1"))
    assert is_pill(pill)
    assert not is_pill(honest)
    assert pill.identity != honest.identity or pill.tid != honest.tid or what_is_wrong(prompt, pill)


def test_what_an_overwritten_run_sampled_is_told_from_damage() -> None:
    prompt, trajectory = generated(TrajectoryId(group_at((0, 7)), 0, 1), OVERWRITTEN_WEIGHTS)
    assert what_is_wrong(prompt, trajectory) == OF_ANOTHER_RUN


@pytest.mark.parametrize("damage", ["none", "token", "logprob", "length", "group", "version"])
def test_any_other_content_is_noticed(damage: str) -> None:
    prompt, trajectory = generated(TrajectoryId(group_at((0, 7)), 0, 1))
    match damage:
        case "token":
            trajectory.response_tokens[2] += 1
        case "logprob":
            trajectory.behavior_logprobs[2] -= 0.01
        case "length":
            trajectory = msgspec.structs.replace(trajectory, response_tokens=trajectory.response_tokens[:-1])
        case "group":
            prompt, _ = generated(TrajectoryId(group_at((0, 8)), 0, 1))
        case "version":
            (span,) = trajectory.spans
            trajectory = msgspec.structs.replace(trajectory, spans=(VersionSpan(0, span.end, WeightVersion(1, 3)),))
    assert bool(what_is_wrong(prompt, trajectory)) == (damage != "none")


@pytest.mark.parametrize(("claims", "fate"), [(1, "unreplaced"), (2, "unfenced")])
async def test_a_learner_that_stays_is_unfenced_only_where_another_one_has_claimed_the_run(
    claims: int, fate: str, broker: Broker, url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness_module, "RUN", run_name)
    for _ in range(claims):
        await begin(broker, rules(1), resume=True)
    witness, stays = Witness(url), multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    stays.start()
    assert await fate_of(stays, lambda: 1, witness, within_s=0.5) == fate
    stays.kill()
    stays.join()
    assert await fate_of(stays, lambda: 1, witness, within_s=0.5) == "left"
    await witness.close()


async def test_an_attack_that_begins_anew_ends_no_other_one() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
        hostile = Hostile(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        asking = asyncio.create_task(hostile.ask(random.Random(0)))
        await asyncio.sleep(0.3)
        await asyncio.gather(asking, hostile.send(random.Random(0)))
        await hostile.close()


async def test_a_full_disk_has_room_again_afterwards(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk")
    disk.mount()
    if not disk.is_mounted:
        pytest.skip("this user may not mount file systems")
    try:
        async with disk.full():
            with pytest.raises(OSError, match="No space left"):
                (tmp_path / "disk" / "file").write_bytes(bytes(1 << 20))
        (tmp_path / "disk" / "file").write_bytes(bytes(1 << 20))
    finally:
        disk.unmount()


async def test_a_process_whose_files_may_not_grow_is_told_and_goes_on(tmp_path: Path) -> None:
    writer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WRITER, tmp_path / "file"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    assert await writer.stdout.readline() == b"written\n"
    async with no_file_grows(writer.pid):
        writer.stdin.write(b"\n")
        assert await writer.stdout.readline() == b"File too large\n"
    writer.stdin.write(b"\n")
    assert await writer.stdout.readline() == b"written\n"
    writer.kill()
    await writer.wait()


async def test_a_flood_finds_whoever_listens_and_ends() -> None:
    ended = asyncio.Queue[None]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.read()
        writer.close()
        ended.put_nowait(None)

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert port in listening_ports([os.getpid()])
        await flood(port, 0.0, connections=20)
        for _ in range(20):
            await ended.get()


@pytest.mark.parametrize("name", PROTECTIONS)
def test_every_protection_is_still_where_it_is_taken_out(name: str, whole_again: None) -> None:
    before = library_text()
    take_out(name)  # asserts that it found what it edits
    if name in ("owner_fence", "server_fence", "over_bound_check", "rewind_fork", "identity_check"):
        assert library_text() != before


@pytest.mark.parametrize(
    ("taken_out", "outcome"), [("", SubmitOutcome.FENCED), ("rewind_fork", SubmitOutcome.ACCEPTED)]
)
async def test_nothing_but_the_fork_refuses_weights_of_a_step_that_is_reached_again(
    taken_out: str, outcome: SubmitOutcome, broker: Broker, whole_again: None
) -> None:
    take_out(taken_out)
    first = await begin(broker, rules(1))
    await first.announce(1)
    (lease,) = (await first.lease(1, 1)).leases
    resumed = await begin(broker, rules(1), checkpoint=CheckpointMark(1, 0), resume=True)
    await resumed.announce(0)
    await resumed.announce(1)
    assert await first.submit(lease, WeightVersion(1, 1)) is outcome


def library_text() -> str:
    keys = Keys("run")
    keys.secret = "secret"
    return function_library.library(keys)[1]


@pytest.fixture
def whole_again() -> Iterator[None]:
    yield
    patch.stopall()


def step(
    number: int,
    *,
    group: int | None = None,
    round_: int = 0,
    samples: Sequence[int] = range(GROUP_SIZE),
    lag: int = 0,
    incarnation: int = 1,
    digest: str = "",
) -> StepRecord:
    """Return one step that trains one group of tokens, which incarnation 1 sampled `lag` steps before."""
    name, spans = (
        group_at((0, number if group is None else group)),
        (VersionSpan(0, 5, WeightVersion(1, number - lag)),),
    )
    trained = tuple(Trained(f"{name}:{round_}:{sample}", spans, 0, "") for sample in samples)
    return StepRecord(WeightVersion(incarnation, number), digest or f"weights {number}", trained)


def leave_trail(
    directory: Path, author: str, records: Sequence[StepRecord], beginning: Beginning = FIRST_WEIGHTS
) -> None:
    trail = Trail(directory, author, beginning)
    for record in records:
        trail.append(record)


def counts(directory: Path, author: str, steps: int = STEPS) -> dict[str, int]:
    """Return the audit of a checkpoint that this learner saved."""
    found: Audit = audit(Lineage.of(Beginning(author, steps), directory), directory, STEPS)
    return {name: getattr(found, name) for name in CLEAN}


def counts_with(directory: Path, *of_step_3: Trained) -> dict[str, int]:
    """Return the audit of a run whose fourth step trained these among its samples."""
    record = step(3)
    others = record.trained[len(of_step_3) :]
    third = StepRecord(record.version, record.digest, (*of_step_3, *others))
    leave_trail(directory, "first", [third if k == 3 else step(k) for k in range(STEPS)])
    return counts(directory, "first")


def generated(tid: TrajectoryId, weights: str = WEIGHTS) -> tuple[Prompt, Trajectory]:
    """Return a prompt and its sample as an engine generates it."""
    text = text_of(int(tid.group[-8:]))
    prompt = Prompt(
        group=tid.group,
        token_ids=[int(digit) for digit in text],
        text=text,
        ground_truth="",
        data_source="chaos",
        num_samples=GROUP_SIZE,
    )
    version, length = WeightVersion(1, 2), response_length(tid)
    tokens = response_tokens(tid, 0, length, version, weights)
    return prompt, Trajectory(
        tid=tid,
        prompt_tokens=np.array(prompt.token_ids, np.int32),
        response_tokens=tokens,
        behavior_logprobs=logprobs_of(tokens),
        loss_mask=np.ones(length, np.uint8),
        spans=(VersionSpan(0, length, version),),
        reward=0.0,
        rewards={},
        finish_reason="stop",
        worker="w",
    )
