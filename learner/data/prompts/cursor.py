"""The cursor knows which prompts to feed next, and which ones a resumed learner feeds again.

A group's name is its place, `EPOCH-POSITION` in fixed width, so that names sort in feed order. Everything
before the watermark has been trained; what was trained after it is remembered by name. A learner that starts
from a saved state feeds again all that is not trained, under the same names, and nothing else.
"""

import logging
import random
from collections.abc import Iterable, Mapping
from typing import Any

from broker.errors import ConfigError
from broker.schema import Prompt

from .rendering import Prompts

log = logging.getLogger(__name__)

PASSED_OVER_IN_A_ROW = 100

Place = tuple[int, int]
"""(epoch, position)"""


class PromptCursor:
    """Walks over the epochs of `prompts`, shuffling each anew by the seed."""

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
        """`epochs` 0: without end. `max_prompt_tokens`: longer ones are passed over. `state`: what `state` returned."""
        self._prompts = prompts
        self._num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle and prompts.size is not None
        self._epochs = epochs
        self._max_prompt_tokens = max_prompt_tokens
        self._orders: dict[int, list[int]] = {}
        self._passed_over = 0
        start = state or {"epoch": 0, "position": 0, "trained": []}
        self._watermark: Place = (int(start["epoch"]), int(start["position"]))
        self._trained: set[Place] = {place_of(group) for group in start["trained"]}
        self._next = self._settled(self._watermark)

    @property
    def is_exhausted(self) -> bool:
        """True once every epoch has been fed; never for an endless run."""
        return self._prompts.size == 0 or bool(self._epochs and self._next[0] >= self._epochs)

    @property
    def watermark(self) -> str:
        """The first group that is not trained; all before it are."""
        return group_at(self._watermark)

    @property
    def trained_beyond(self) -> tuple[str, ...]:
        """The groups after the watermark that are trained."""
        return tuple(group_at(place) for place in sorted(self._trained))

    @property
    def position(self) -> str:
        """The group to feed next."""
        return group_at(self._next)

    def next(self, count: int) -> list[Prompt]:
        """The next prompts to feed, `count` of them unless the last epoch ends before.

        Raises ConfigError where prompt after prompt is longer than `max_prompt_tokens`.
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
        """Go back to the watermark: the broker has forgotten what it was fed, or may have."""
        self._next = self._settled(self._watermark)

    def fed_before(self) -> list[Prompt]:
        """Again all from the watermark to where the feed stands, without those trained."""
        end = self._next
        self.feed_again()
        prompts: list[Prompt] = []
        while self._next < end:
            prompts += self.next(1)
        return prompts

    def mark_trained(self, groups: Iterable[str]) -> None:
        """These groups are done with: trained, or dropped by a stated rule. Repeating is harmless."""
        self._trained |= {place for place in map(place_of, groups) if place >= self._watermark}
        while self._watermark in self._trained:
            self._trained.remove(self._watermark)
            self._watermark = self._after(self._watermark)
        # A replayed batch is trained before this cursor has come to feed it.
        self._next = self._settled(max(self._next, self._watermark))

    def state(self, trained: Iterable[str] = ()) -> dict[str, Any]:
        """Plain data for a checkpoint whose weights contain all groups marked so far, and `trained`."""
        self.mark_trained(trained)
        epoch, position = self._watermark
        return {
            "epoch": epoch,
            "position": position,
            "trained": list(self.trained_beyond),
        }

    def _fits(self, prompt: Prompt) -> bool:
        length, limit = len(prompt.token_ids), self._max_prompt_tokens
        if limit is None or length <= limit:
            self._passed_over = 0
            return True
        self._passed_over += 1
        told = (
            f"Prompt {prompt.group} has {length} tokens; engine.max_model_len - sampling.max_new_tokens leaves {limit}."
        )
        if self._passed_over >= PASSED_OVER_IN_A_ROW:
            raise ConfigError(
                f"{told} So had the {PASSED_OVER_IN_A_ROW - 1} before it: raise engine.max_model_len, or lower "
                "sampling.max_new_tokens."
            )
        log.warning("%s It is passed over.", told)
        return False

    def _prompt(self, place: Place) -> Prompt:
        epoch, position = place
        index = self._order(epoch)[position] if self._shuffle else position
        return self._prompts.train(epoch, index, group=group_at(place), num_samples=self._num_samples)

    def _settled(self, place: Place) -> Place:
        """The first place from `place` on that is not trained."""
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
    """The name of the group at `place`."""
    epoch, position = place
    return f"{epoch:04d}-{position:08d}"


def place_of(group: str) -> Place:
    """The place that a group's name states."""
    epoch, _, position = group.partition("-")
    return int(epoch), int(position)
