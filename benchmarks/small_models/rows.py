"""The rows that are measured: a step's samples, packed with and without shared prompts."""

from dataclasses import dataclass

from benchmarks.prefix_trees import samples
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.clusters import PrefixSharing
from headway.learner.batching.cost import CostModel
from headway.learner.batching.packing import concatenate
from headway.learner.batching.units import pack_units


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Samples of a step, in groups of eight."""

    samples: int
    budget: int
    """The tokens of a micro-batch."""
    sharing: PrefixSharing
    prompt: int = 64
    response: int = 50
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.samples} samples, rows of {self.budget}, {self.sharing}"

    def batch(self, vocabulary: int) -> PackedBatch:
        """Return all samples as one row, which shares tokens unless `sharing` is never."""
        given = list(samples(self.samples, 8, self.prompt, self.response, vocabulary, self.seed))
        return concatenate(given, is_tree=self.sharing != "never")

    def rows(self, vocabulary: int, cost: CostModel) -> list[PackedBatch]:
        """Return the micro-batches."""
        given = list(samples(self.samples, 8, self.prompt, self.response, vocabulary, self.seed))
        rows = pack_units(
            [[one] for one in given],
            replica=0,
            replicas=1,
            micro_batch_tokens=self.budget,
            cost=cost,
            prefix_sharing=self.sharing,
        )
        return [row.batch for row in rows]
