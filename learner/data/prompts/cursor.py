"""The cursor knows which prompts to feed next, and which ones a resumed learner feeds again.

A group's name is its place, `EPOCH-POSITION` in fixed width, so that names sort in feed order. All groups before the
watermark have been trained; the cursor remembers later trained groups by name. A learner that starts from a saved state
feeds exactly the untrained groups again, under the same names.
"""

import logging
import random
from collections.abc import Iterable, Mapping
from typing import Any

from headway.broker.errors import ConfigError
from headway.broker.schema import Prompt

from .rendering import Prompts

log = logging.getLogger(__name__)

PASSED_OVER_IN_A_ROW = 100

Place = tuple[int, int]
"""(epoch, position) of a prompt."""


class PromptCursor:
    """Walks over the epochs of `prompts`, shuffling each by the seed."""

    def __init__(
        self,
        prompts: Prompts,
        *,
        num_samples: int,
        seed: int,
        shuffle: bool = True,
        epochs: int = 0,
        max_prompt_tokens: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """With `epochs` 0 there is no end. Prompts over `max_prompt_tokens` are passed over. `state` is a saved one.
        Raises ConfigError if it is a place in other prompts."""
        self._prompts = prompts
        self._num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle and prompts.size is not None
        self._epochs = epochs
        self._max_prompt_tokens = max_prompt_tokens
        self._orders: dict[int, list[int]] = {}
        self._passed_over = 0
        self.long_prompts = 0
        """The prompts over `max_prompt_tokens` that were passed over so far."""
        start = state or {"epoch": 0, "position": 0, "trained": []}
        if start.get("prompts", prompts.digest) != prompts.digest:
            raise ConfigError(
                f"prompts.path: the prompts have changed since the checkpoint, in which the run stands at epoch"
                f" {start['epoch']}, position {start['position']}: that would be another prompt now. Bring the rows"
                " back as they were, or start a new run (run.name=...) from model.path=CHECKPOINT."
            )
        self._watermark: Place = (int(start["epoch"]), int(start["position"]))
        self._trained: set[Place] = {place_of(group) for group in start["trained"]}
        self._next = self._settled(self._watermark)

    @property
    def is_exhausted(self) -> bool:
        """True once every epoch has been fed; never for an endless run."""
        return self._prompts.size == 0 or bool(self._epochs and self._next[0] >= self._epochs)

    @property
    def watermark(self) -> str:
        """The first group that is not trained."""
        return group_at(self._watermark)

    @property
    def trained_beyond(self) -> tuple[str, ...]:
        """The trained groups after the watermark."""
        return tuple(group_at(place) for place in sorted(self._trained))

    @property
    def position(self) -> str:
        """The group to feed next."""
        return group_at(self._next)

    def next(self, count: int) -> list[Prompt]:
        """Returns the next `count` prompts to feed, fewer at the end of the last epoch.

        Raises ConfigError after too many prompts in a row that are longer than `max_prompt_tokens`.
        """
        prompts: list[Prompt] = []
        while len(prompts) < count and not self.is_exhausted:
            place, prompt = self._next, self._prompt(self._next)
            self._next = self._settled(self._after(place))
            if self._fits(prompt):
                prompts.append(prompt)
            else:
                self.mark_trained([prompt.group])
        return prompts

    def feed_again(self) -> None:
        """Goes back to the watermark, since the broker may have forgotten prompts."""
        self._next = self._settled(self._watermark)

    def fed_before(self) -> list[Prompt]:
        """Returns the untrained prompts from the watermark to the feed's position, to feed them again."""
        end = self._next
        self.feed_again()
        prompts: list[Prompt] = []
        while self._next < end:
            prompts += self.next(1)
        return prompts

    def mark_trained(self, groups: Iterable[str]) -> None:
        """Marks groups that were trained, or dropped by a stated rule. Idempotent."""
        self._trained |= {place for place in map(place_of, groups) if place >= self._watermark}
        while self._watermark in self._trained:
            self._trained.remove(self._watermark)
            self._watermark = self._after(self._watermark)
        # A replayed batch may be trained before this cursor has reached its prompts.
        self._next = self._settled(max(self._next, self._watermark))

    def state(self, trained: Iterable[str] = ()) -> dict[str, Any]:
        """Returns plain data for a checkpoint whose weights contain all groups marked so far, and `trained`."""
        self.mark_trained(trained)
        epoch, position = self._watermark
        of = {"prompts": self._prompts.digest} if self._prompts.digest else {}
        return {"epoch": epoch, "position": position, "trained": list(self.trained_beyond), **of}

    def _fits(self, prompt: Prompt) -> bool:
        length, limit = len(prompt.token_ids), self._max_prompt_tokens
        if limit is None or length <= limit:
            self._passed_over = 0
            return True
        self._passed_over += 1
        self.long_prompts += 1
        message = (
            f"Prompt {prompt.group} has {length} tokens; engine.max_model_len - sampling.max_new_tokens leaves {limit}."
        )
        if self._passed_over >= PASSED_OVER_IN_A_ROW:
            raise ConfigError(
                f"{message} So had the {PASSED_OVER_IN_A_ROW - 1} before it: raise engine.max_model_len, or lower "
                "sampling.max_new_tokens."
            )
        log.warning("%s It is passed over.", message)
        return False

    def _prompt(self, place: Place) -> Prompt:
        epoch, position = place
        index = self._order(epoch)[position] if self._shuffle else position
        return self._prompts.train(epoch, index, group=group_at(place), num_samples=self._num_samples)

    def _settled(self, place: Place) -> Place:
        """Returns the first place from `place` on that is not trained."""
        while place in self._trained:
            place = self._after(place)
        return place

    def _after(self, place: Place) -> Place:
        epoch, position = place
        if self._prompts.size is not None and position + 1 >= self._prompts.size:
            return epoch + 1, 0
        return epoch, position + 1

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(self._prompts.size or 0))
            random.Random(f"order:{self._seed}:{epoch}").shuffle(order)
            self._orders = {epoch: order}
        return self._orders[epoch]


def group_at(place: Place) -> str:
    """Returns the name of the group at `place`."""
    epoch, position = place
    return f"{epoch:04d}-{position:08d}"


def place_of(group: str) -> Place:
    """Returns the place that a group's name states."""
    epoch, _, position = group.partition("-")
    return int(epoch), int(position)
