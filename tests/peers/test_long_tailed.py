"""Prompts whose responses have a long-tailed length."""

from itertools import islice

import numpy as np
import pytest

from benchmarks.peers.long_tailed import FEWEST_TERMS, MOST_TERMS, LongTailedPrompts, worked_examples
from headway.learner.data.prompts.base import Item
from headway.rollout_workers.rewards.reasoning_gym_reward import Verifiers


def terms_of(text: str) -> int:
    """Return the number of terms in a question of `chain_sum`."""
    return len(text.partition(": ")[2].removesuffix(" =").split()) // 2 + 1


def check_long_tailed(terms: list[int]) -> None:
    assert (min(terms), max(terms)) == (FEWEST_TERMS, MOST_TERMS)
    assert np.median(terms) == 4
    assert np.percentile(terms, 99) > 10 * 4


def items(count: int, seed: int = 0, epoch: int = 0) -> list[Item]:
    prompts = LongTailedPrompts(path="chain_sum", seed=seed)
    return [prompts.train(epoch, position) for position in range(count)]


def test_prompts_are_long_tailed_and_the_same_for_the_same_seed() -> None:
    first = items(1000)
    check_long_tailed([terms_of(str(item.content)) for item in first])
    assert items(50) == first[:50]
    backwards = LongTailedPrompts(path="chain_sum", seed=0)
    assert [backwards.train(0, position) for position in reversed(range(50))] == first[:50][::-1]
    for other in (items(50, seed=1), items(50, epoch=1)):
        assert [item.content for item in other] != [item.content for item in first[:50]]


@pytest.mark.parametrize("path", ["chain_sum", "arithmetic"])
def test_held_out_prompts_are_the_same_for_every_seed_and_never_trained(path: str) -> None:
    held_out = LongTailedPrompts(path=path, seed=0).held_out(100)
    assert held_out == LongTailedPrompts(path=path, seed=1).held_out(100)
    prompts, contents = LongTailedPrompts(path=path, seed=0), {item.content for item in held_out}
    assert not contents & {prompts.train(0, position).content for position in range(500)}
    assert not contents & {one.query for one in islice(worked_examples(path=path, seed=0), 500)}
    assert max(len(str(item.content)) for item in held_out) > 4 * min(len(str(item.content)) for item in held_out)


def test_worked_examples_are_as_long_as_their_prompts_and_right() -> None:
    examples = list(islice(worked_examples(path="chain_sum", seed=0), 2000))
    check_long_tailed([terms_of(one.query) for one in examples])
    assert all(one.response.count("\n") == terms_of(one.query) - 1 for one in examples)
    assert examples[:50] == list(islice(worked_examples(path="chain_sum", seed=0), 50))


def test_careless_examples_are_wrong_and_as_long() -> None:
    careful = islice(worked_examples(path="chain_sum", seed=0), 100)
    careless = islice(worked_examples(path="chain_sum", seed=0, error_rate=1.0), 100)
    for one, other in zip(careful, careless, strict=True):
        assert one.query == other.query
        assert one.response != other.response
        assert one.response.count("\n") == other.response.count("\n")


def test_the_reward_knows_the_prompts() -> None:
    for item in items(20):
        assert Verifiers().score("g", item.extra_info, f"work\n<answer>{item.ground_truth}</answer>")[0] == 1
        assert Verifiers().score("g", item.extra_info, "work\n<answer>none</answer>")[0] == 0
