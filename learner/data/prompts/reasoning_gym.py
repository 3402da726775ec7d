"""A source of reasoning-gym tasks by name. It is endless: entries are generated in blocks, each with its own seed.

`extra_info` carries {"task": name, "entry": question, answer and metadata, as JSON has them} for the scorer.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from headway.broker.errors import ConfigError
from headway.broker.installation import check_extra
from headway.broker.user_code.kinds import did_you_mean

from .base import Item, PromptSource, is_held_out

BLOCK = 100
"""The number of entries of one generator: some tasks make all at once, some take no index beyond their size."""
MAX_DRAWS = 200
"""The most draws for one entry on the wanted side of the split; one text in 16 is held out."""


def open_tasks(path: str, options: Mapping[str, Any], *, seed: int) -> PromptSource:
    """Opens the task that `path` names, with its options; or several, separated by commas, with options by name."""
    tasks = [task.strip() for task in path.split(",")]
    if len(tasks) == 1:
        return ReasoningGymPrompts(tasks[0], options, seed=seed)
    for name, of_task in options.items():
        if name not in tasks or not isinstance(of_task, Mapping):
            raise ConfigError(
                f"prompts.options: {name} is {of_task!r}; with several tasks give each one's options under its name "
                f"({', '.join(tasks)})."
            )
    return TaskRotation([ReasoningGymPrompts(task, options.get(task, {}), seed=seed) for task in tasks])


class TaskRotation:
    """Endless sources in turn, so that every batch and every evaluation has equally many items of each."""

    def __init__(self, sources: Sequence[PromptSource]) -> None:
        self._sources = sources

    @property
    def size(self) -> None:
        return None

    def train(self, epoch: int, position: int) -> Item:
        turn, source = divmod(position, len(self._sources))
        return self._sources[source].train(epoch, turn)

    def held_out(self, count: int) -> list[Item]:
        each = -(-count // len(self._sources))
        rounds = zip(*(source.held_out(each) for source in self._sources), strict=True)
        return [item for items in rounds for item in items][:count]


class ReasoningGymPrompts:
    """A source of one task's entries. `options` are the task's own, such as `max_terms`."""

    def __init__(self, task: str, options: Mapping[str, Any], *, seed: int) -> None:
        self._task = task
        self._options = dict(options)
        self._seed = seed
        self._block = lru_cache(maxsize=8)(self._generate)
        self._check()

    @property
    def size(self) -> None:
        return None

    def train(self, epoch: int, position: int) -> Item:
        for draw in range(MAX_DRAWS):
            entry = self._entry(f"{self._seed}:{epoch}:{draw}", position)
            if not is_held_out(entry["question"]):
                return self._item(entry)
        raise self._too_few(f"none of {MAX_DRAWS} draws for position {position} may be trained")

    def held_out(self, count: int) -> list[Item]:
        items: list[Item] = []
        for position in range(MAX_DRAWS * count):
            entry = self._entry("held-out", position)
            if is_held_out(entry["question"]):
                items.append(self._item(entry))
            if len(items) == count:
                return items
        raise self._too_few(f"{MAX_DRAWS * count} draws gave {len(items)} of {count} held-out prompts")

    def _entry(self, stream: str, position: int) -> dict[str, Any]:
        block, index = divmod(position, BLOCK)
        entry: dict[str, Any] = json.loads(json.dumps(self._block(f"{stream}:{block}")[index]))
        return entry

    def _item(self, entry: dict[str, Any]) -> Item:
        answer = entry["answer"]
        return Item(
            content=entry["question"],
            ground_truth="" if answer is None else str(answer),
            data_source=f"reasoning_gym/{self._task}",
            extra_info={"task": self._task, "entry": entry},
        )

    def _generate(self, stream: str) -> Any:
        import reasoning_gym

        # The seed is hashed, since neighbouring seeds share entries: entry i of seed s is entry i - 1 of seed s + 1.
        seed = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=4).digest()) >> 1
        return reasoning_gym.create_dataset(self._task, size=BLOCK, seed=seed, **self._options)

    def _check(self) -> None:
        """Generates one entry, so that a wrong name or option raises at once."""
        check_extra("reasoning-gym", "reasoning_gym", "prompts.kind=reasoning_gym", name="reasoning-gym")
        from reasoning_gym.factory import DATASETS

        if self._task not in DATASETS:
            hint = did_you_mean(self._task, DATASETS)
            raise ConfigError(f"prompts.path: reasoning_gym has no task {self._task!r} among its {len(DATASETS)}{hint}")
        reserved = {"size", "seed"} & self._options.keys()
        if reserved:
            raise ConfigError(
                f"prompts.options: {' and '.join(sorted(reserved))} are set by Headway: entries are endless "
                "and the seed is the run's."
            )
        try:
            self._entry(f"{self._seed}:0:0", 0)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"prompts.options: reasoning_gym task {self._task!r} refuses them: {error}.") from error

    def _too_few(self, what: str) -> ConfigError:
        return ConfigError(f"prompts.path: reasoning_gym task {self._task!r} has too few different questions: {what}.")
