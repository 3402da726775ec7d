"""A replay trains the batches of a run's log again, in the same order, without a broker or workers.

A digest of 32 hexadecimal digits is equal for two sets of weights exactly where their bits are.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from headway.broker.errors import HeadwayError
from headway.broker.schema import WeightVersion
from headway.learner.experience.log import ExperienceLog
from headway.learner.objective.update import Updater

from .loop import Stopwatch, TrainedStep


class ReplayError(HeadwayError):
    """The run cannot be replayed as asked; the message says which steps can be."""


def replay(updater: Updater, experience_log: ExperienceLog, steps: range) -> Iterator[TrainedStep]:
    """Trains these steps and yields each; the backend then holds the weights that the step led to.

    With the run's settings, rank count and first weights the results are the same, bit for bit. Raises ReplayError.
    """
    for step in steps:
        watch = Stopwatch()
        groups = experience_log.read(step)
        if groups is None:
            raise ReplayError(
                f"The experience log does not hold step {step}; it can be replayed up to there (--steps)."
            )
        watch.lap("take")
        scored = updater.compute_advantages(groups, step)
        batches = updater.pack(scored.sequences)
        watch.lap("pack")
        # The run's own learner has compared its engine's tokens; a replay with other settings has other weights.
        update = updater.update(batches, step, is_of_this_learner=False)
        watch.lap("train")
        for phase in ("publish", "checkpoint"):
            watch.lap(phase)
        version = WeightVersion(0, step)
        yield TrainedStep(version=version, groups=groups, scored=scored, update=update, laps=watch.laps)


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Returns a digest of names, types, shapes and bytes; the order of the tensors does not matter."""
    parts = sorted(f"{name} {_tensor_digest(tensor)}" for name, tensor in tensors)
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def saved_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of the model in `directory`, one at a time."""
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                yield name, tensors.get_tensor(name)


def _tensor_digest(tensor: torch.Tensor) -> str:
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
