"""Megatron's critics and reward models compute under every layout what fsdp's compute on one rank."""

from pathlib import Path
from typing import Literal

import msgspec
import pytest
import torch

from headway.learner.backends import open_backend
from headway.learner.config import LayoutConfig, ModelConfig

from . import values_rank
from .scoring import by_transformers, responses, scores
from .tiny import OPTIMIZER, model_config
from .torchrun import run_ranks
from .values_rank import STEPS, Story, told

PROCESSES = 2
LAYOUTS = [
    LayoutConfig(tensor=2, expert_tensor=2),
    LayoutConfig(pipeline=2, virtual_pipeline=2),
    LayoutConfig(context=2, expert=2),
    LayoutConfig(),
]
"""Layouts in which each key occurs; the last has two replicas."""


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Return a reward model from whose head a critic starts."""
    directory = tmp_path_factory.mktemp("scores") / "model"
    open_backend("fsdp", model_config("qwen3_moe", num_hidden_layers=4), OPTIMIZER, seed=3, head="score").save(
        directory
    )
    return ModelConfig(path=str(directory), dtype="float32")


@pytest.fixture(scope="module")
def ran(reward_model: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    layouts = msgspec.json.encode(LAYOUTS).decode()
    run_ranks(values_rank.__name__, PROCESSES, directory, reward_model.path, layouts)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LAYOUTS)))
@pytest.mark.parametrize("what", ["critic", "resumed", "scores"])
def test_a_layout_computes_what_fsdp_computes(what: str, number: int, ran: Path, reward_model: ModelConfig) -> None:
    head: Literal["value", "score"] = "score" if what == "scores" else "value"
    expected = told(open_backend("fsdp", reward_model, values_rank.OPTIMIZER, head=head), range(STEPS))
    assert min(expected.norms) > values_rank.OPTIMIZER.max_grad_norm, "no gradient was clipped"
    assert max(map(abs, expected.values[0])) > 1
    ranks = [msgspec.json.decode((ran / f"rank_{rank}.json").read_bytes()) for rank in range(PROCESSES)]
    stories = [msgspec.convert(stories[f"{what} {number}"], Story) for stories in ranks]
    for story in stories:
        assert story.moved == [], "the process's generator goes on as it would without the model"
        assert story.losses == pytest.approx(expected.losses, rel=1e-4)
        assert story.norms == pytest.approx(expected.norms, rel=1e-3)
    for step, values in enumerate(expected.values):
        found = [sum(story.values[step][place] for story in stories if story.is_lead) for place in range(len(values))]
        assert found == pytest.approx(values, rel=1e-3, abs=1e-3)


@pytest.mark.slow
def test_every_layout_leaves_the_reward_model_that_fsdp_leaves(ran: Path, reward_model: ModelConfig) -> None:
    backend = open_backend("fsdp", reward_model, values_rank.OPTIMIZER, head="score")
    before = scores(backend, texts := responses(9, 14, 6))
    told(backend, range(STEPS))
    expected = scores(backend, texts)
    assert (expected - before).abs().max() > 0.02
    for number in range(len(LAYOUTS)):
        found = by_transformers(ran / f"scores_{number}", texts)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
