"""A learner whose batches the test decides: the real command, and a worker whose answers depend on ids alone.

The worker answers step by step, as far as the test tells it, so a test knows at which step the learner waits.
"""

import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from headway.broker import BlockingBroker
from headway.broker.client.leases import SubmitOutcome
from headway.broker.schema import Lease, Trajectory, VersionSpan, WeightVersion

from .recipes import write_recipe
from .terminals import DEADLINE_S, Terminal, Terminals
from .watching import Watch

RUN = "fixed"
STEPS, CHECKPOINT_EVERY = 7, 3
GROUPS, SAMPLES, MAX_LAG = 3, 4, 2
VOCABULARY = 19
POLL_S = 0.02

NOISE = '''"""An advantage that draws from every generator there is: a resumed learner must go on with their states."""

import random

import numpy
import torch


def advantages(rewards_S, group_S):
    if (rewards_S == 13).any():
        raise IndexError("index 13 is out of range")
    noise = torch.randn(len(rewards_S), dtype=torch.float64) + random.gauss(0, 1) + numpy.random.normal()
    return rewards_S - rewards_S.mean() + 0.1 * noise, {}
'''


class ScriptedWorker:
    """Leases and submits like any worker. The samples of slot k claim weights k - MAX_LAG, as late as allowed."""

    def __init__(self, url: str, terminals: Terminals) -> None:
        self._terminals = terminals
        self._blocking = BlockingBroker(url, RUN)
        self._broker = self._blocking.broker
        self.watch = Watch(self._blocking, terminals)

    def answer(self, slots: Sequence[int]) -> None:
        """Answer all groups of these slots, in order: step k trains slot k."""
        for slot in slots:
            self.answer_groups(slot, GROUPS)

    def answer_groups(self, slot: int, groups: int, reward: float | None = None) -> None:
        """Answer the next so many groups of a slot; all with this reward, if one is given."""
        step = max(0, slot - MAX_LAG)
        self.watch.until_step(step)
        missing = groups * SAMPLES
        deadline = time.monotonic() + DEADLINE_S
        while missing:
            reply = self._blocking.call(self._broker.leases.lease("scripted", WeightVersion(1, step), missing, 60.0))
            for lease in reply.leases:
                sample = answer(lease, step) if reward is None else replace(answer(lease, step), reward=reward)
                outcome = self._blocking.call(self._broker.leases.submit(lease, sample))
                assert outcome is SubmitOutcome.ACCEPTED
            missing -= len(reply.leases)
            self._terminals.check()
            assert time.monotonic() < deadline, f"slot {slot}: {missing} leases are not to be had ({reply.reason})"
            time.sleep(POLL_S)

    def close(self) -> None:
        self._blocking.close()


def answer(lease: Lease, step: int) -> Trajectory:
    """Return a random sample, from the id alone, that is close to a sample of random weights."""
    rng = np.random.default_rng(zlib.crc32(str(lease.tid).encode()))
    length = int(rng.integers(5, 13))
    return Trajectory(
        tid=lease.tid,
        prompt_tokens=np.array(lease.prompt.token_ids, np.int32),
        response_tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
        behavior_logprobs=-rng.uniform(2.5, 3.5, length).astype(np.float32),
        loss_mask=np.ones(length, np.uint8),
        spans=(VersionSpan(0, length, WeightVersion(1, step)),),
        reward=float(rng.integers(0, 2)),
        rewards={},
        finish_reason="stop",
        worker="scripted",
    )


@contextmanager
def scripted_worker(url: str, terminals: Terminals) -> Iterator[ScriptedWorker]:
    worker = ScriptedWorker(url, terminals)
    try:
        yield worker
    finally:
        worker.close()


def start_learner(terminals: Terminals, url: str, *arguments: str) -> Terminal:
    """Start a learner in the directory `learner`, which a resumed one finds again."""
    home = terminals.directory("learner")
    (home / "noise.py").write_text(NOISE)
    recipe = write_recipe(
        home,
        # The answers have logprobs of no model.
        learner={"steps": STEPS, "groups_per_step": GROUPS, "group_size": SAMPLES, "agreement_bound": 0},
        checkpoint={"every_steps": CHECKPOINT_EVERY},
        staleness={"max_lag": MAX_LAG},
        algorithm={"advantage": {"kind": "noise:advantages"}},
        evaluation={"prompts": 4},
    )
    return terminals.open("learner", "learner", recipe, "--broker", url, "--run", RUN, *arguments)


def run_directory(terminals: Terminals) -> Path:
    return terminals.root / "learner" / "runs" / RUN


def checkpoint_at(terminals: Terminals, incarnation: int, step: int) -> Path:
    return run_directory(terminals) / "checkpoints" / str(incarnation) / f"step_{step}"


def final_checkpoint(terminals: Terminals, incarnation: int) -> Path:
    return checkpoint_at(terminals, incarnation, STEPS)


def training_state(checkpoint: Path) -> dict[str, Any]:
    """Return parameters and moments by name, whatever number of ranks wrote them."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(checkpoint / "training_state")
    found = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    assert tensors.keys() == found.keys()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the missing process group
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors
