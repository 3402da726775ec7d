"""Each part of the flow by itself. Run it with: pytest"""

import pytest
import torch
from my_flow.environment import TwoTries
from my_flow.objective import clipped
from my_flow.prompts import Sums
from my_flow.rewards import right

from headway.algorithms.tokens import Tokens
from headway.broker.schema import Prompt
from headway.rollout_workers.environments import Episode

PROMPT = Prompt(group="0-0", token_ids=[1], text="3+4=", ground_truth="7", data_source="sums", num_samples=1)


def test_no_sum_is_both_trained_and_held_out() -> None:
    sums = Sums(path="", seed=0, largest=9)
    trained = {sums.train(0, position).content for position in range(sums.size)}
    held_out = {item.content for item in sums.held_out(1000)}
    assert len(trained) == sums.size
    assert not trained & held_out
    assert len(trained | held_out) == 100


@pytest.mark.parametrize(("answer", "score"), [("7", 1.0), ("8", 0.1), ("+", 0.0)])
def test_the_right_number_is_worth_most(answer: str, score: float) -> None:
    assert right("sums", answer, "7", {})["score"] == score


def test_a_wrong_answer_is_asked_for_again() -> None:
    def step(*answers: str, score: float) -> tuple[float, object]:
        rewards = (0.0,) * (len(answers) - 1)
        said = TwoTries(discount=0.5).step(
            Episode(prompt=PROMPT, answers=answers, rewards=rewards, score=score, finish_reason="stop", room=20)
        )
        return said.reward, said.says

    assert step("8", score=0.1) == (0.0, "?3+4=")
    assert step("8", "7", score=1.0) == (0.5, "")
    assert step("7", score=1.0) == (1.0, "")


def test_a_ratio_beyond_the_bound_has_no_gradient() -> None:
    current_T = torch.tensor([0.0, 1.0, 1.0], requires_grad=True)
    zeros_T, mask_T = torch.zeros(3), torch.tensor([1.0, 1.0, 0.0])
    tokens = Tokens(zeros_T, torch.ones(3), mask_T, torch.zeros(3, dtype=torch.int64), torch.tensor([0, 3]))
    losses_T, metrics = clipped(current_T, zeros_T, tokens, clip=0.2)
    losses_T.sum().backward()
    assert current_T.grad is not None
    assert current_T.grad.tolist() == [-1.0, 0.0, 0.0]
    assert (metrics["clipped_sum"].item(), metrics["clipped_count"].item()) == (1.0, 2.0)
