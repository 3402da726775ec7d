"""The learner's stand-in: it owns the run, keeps it fed, takes what is ready, publishes weights, and trains nothing."""

from itertools import count, islice
from pathlib import Path

import torch

from headway.broker import BlockingBroker
from headway.broker.client.learner import CheckpointMark, TakenBatch
from headway.broker.schema import Prompt, RunRules, WeightVersion
from headway.broker.schema.status import WorkerInfo
from headway.broker.schema.weights import Probe
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import recipe_to_bytes
from headway.learner.models.model_files import model_files
from headway.weightsync.publisher import Publisher, PublishReport

from .workload import prompts, read_weights

NO_LIMIT = 1_000_000
"""A limit on lag and on groups that is never reached: nothing here waits for the learner."""
FED_AHEAD = 2000
"""The number of groups that wait to be begun."""
PROBE = Probe(token_ids=[2], logprobs=[], tolerance=0.0)
"""A probe without a comparison: the fingerprints prove that the weights are whole."""


class StandInLearner:
    """The stand-in, which a single thread calls."""

    def __init__(self, url: str, recipe: Recipe) -> None:
        self._blocking = BlockingBroker(url, recipe.run.name)
        self._broker = self._blocking.broker
        rules = RunRules(max_lag=NO_LIMIT, groups_per_step=NO_LIMIT, max_bytes=recipe.broker.max_bytes)
        claim = self._broker.batches.claim(
            checkpoint=CheckpointMark(0, 0), rules=rules, config=recipe_to_bytes(recipe), resume=False
        )
        self._owner = self._blocking.call(claim).owner
        files = model_files(recipe.model)
        self._blocking.call(self._broker.versions.put_model(self._owner, files))
        self._publisher = Publisher(self._blocking, self._owner, recipe.weights)
        self._group_size = recipe.learner.group_size
        device = "cuda" if recipe.weights.staging == "device" else "cpu"
        self._weights = [
            (name, tensor.to(device)) for name, tensor in read_weights(Path(recipe.model.path), recipe.model.dtype)
        ]
        self._prompts, self._numbers = prompts(), count()
        self._step = -1
        self.taken = 0
        """The number of taken trajectories."""

    def feed(self) -> None:
        """Feed as many groups as are missing."""
        ahead, _ = self._blocking.call(self._broker.prompts.waiting())
        new = [
            Prompt(
                group=f"0000-{next(self._numbers):08d}",
                token_ids=tokens,
                text="=",
                ground_truth="1",
                data_source="worker_overhead",
                num_samples=self._group_size,
            )
            for tokens in islice(self._prompts, max(0, FED_AHEAD - ahead))
        ]
        self._blocking.call(self._broker.prompts.feed(new, self._owner))

    def publish(self) -> PublishReport:
        """Publish the next version, which differs in one tensor."""
        self._step += 1
        name, last = self._weights[-1]
        self._weights[-1] = name, torch.nextafter(last, torch.full_like(last, torch.inf))
        gathering = self._publisher.gather(self._weights)
        return self._publisher.publish(WeightVersion(self._owner.incarnation, self._step), gathering, PROBE)

    def take(self) -> None:
        """Take all ready groups for the step of the newest version, and commit it.

        Call it once before each version but the first: samples newer than a taken step count as another branch's, and
        are generated anew.
        """
        ready = self._blocking.call(self._broker.status.snapshot()).queues.ready
        if ready:
            batch = self._blocking.call(self._broker.batches.take(self._owner, self._step, ready))
            self.taken += sum(len(group.trajectories) for group in batch.groups) if isinstance(batch, TakenBatch) else 0
            self._blocking.call(self._broker.batches.commit(self._owner, self._step + 1))

    def worker(self) -> WorkerInfo | None:
        """Return the latest report of the only worker."""
        workers = self._blocking.call(self._broker.status.workers())
        return workers[0] if workers else None

    def close(self) -> None:
        self._blocking.call(self._broker.status.set_state(self._owner, "finished"))
        self._publisher.close()
        self._blocking.close()
