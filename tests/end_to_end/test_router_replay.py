"""The learner trains each token with the experts that the engine gave it, from engine to update and in a whole run."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.broker.schema import Lease, Prompt, Trajectory, TrajectoryId
from headway.broker.wire.codec import decode_trajectory, encode_trajectory
from headway.learner.backends import open_backend
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import concatenate, from_trajectory
from headway.learner.batching.router_replay import routing_of
from headway.learner.config import ModelConfig, OptimizerConfig, RandomModelConfig
from headway.learner.models.pretrained import load_config, load_model, load_tokenizer
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import open_engine
from headway.rollout_workers.engines.base import GenerationRequest
from headway.rollout_workers.samples.generation import generate
from headway.rollout_workers.samples.recorder import Recorder

from .recipes import MODEL, write_recipe
from .records import check_trained, lines
from .terminals import Terminals

SAMPLES, TOKENS, STEPS = 6, 60, 3
MANY_EXPERTS = {**MODEL["random"]["config"], "num_experts": 32, "num_experts_per_tok": 4}
"""A configuration of so many experts that some choices are near ties."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory = tmp_path_factory.mktemp("model")
    random = ModelConfig(random=RandomModelConfig(**{**MODEL["random"], "config": MANY_EXPERTS}))
    load_model(random, 1).save_pretrained(directory)
    load_tokenizer(random).save_pretrained(directory)
    return ModelConfig(path=str(directory))


async def sampled(model: ModelConfig, dtype: Any) -> list[Trajectory]:
    """Return samples of an engine of this number format, as they reach the learner."""
    config = EngineConfig(max_concurrent=4, max_model_len=128, dtype=dtype)
    engine = open_engine(config, Path(model.path), seed=0)
    frames = []
    for number in range(SAMPLES):
        asked = GenerationRequest(
            request_id=str(number),
            prompt_tokens=[2 + number, 3, 4],
            max_new_tokens=TOKENS,
            temperature=1.0,
            stop_token_ids=[],
            seed=number,
        )
        recorder = Recorder(prompt_length=len(asked.prompt_tokens))
        await generate(engine, asked, recorder)
        frames.append(encode_trajectory(recorder.to_trajectory(lease(asked), {}, 0.0, "w")))
    await engine.close()
    return [decode_trajectory(frame) for frame in frames]


def lease(asked: GenerationRequest) -> Lease:
    prompt = Prompt(
        group="0000-00000000",
        token_ids=asked.prompt_tokens,
        text="",
        ground_truth="",
        data_source="",
        num_samples=SAMPLES,
    )
    return Lease(tid=TrajectoryId(prompt.group, 0, int(asked.request_id)), token="t", ttl_s=1.0, prompt=prompt)


def seen_by_the_learner(model: ModelConfig, batch: PackedBatch) -> tuple[float, float]:
    """Return the mean absolute difference of the learner's logprobs from the engine's, and the share of new choices."""
    backend = open_backend("fsdp", model, OptimizerConfig())
    (logprobs_T,) = backend.logprobs([batch], 1.0)
    gap = float(((logprobs_T - batch.behavior_logprobs_T).abs() * batch.loss_mask_T).sum() / batch.loss_mask_T.sum())

    def no_loss(_: int, current_T: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        return current_T.sum() * 0.0, {}

    (report,) = backend.step([batch], no_loss, 1.0, 0.0)[2]
    return gap, report.get("router_disagreement_sum", 0.0) / report.get("router_disagreement_count", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_replay_brings_the_learner_closer_to_an_engine_that_rounds(model: ModelConfig, dtype: Any) -> None:
    routing = routing_of(load_config(model))
    trajectories = await sampled(model, dtype)
    packable = [from_trajectory(one, advantages=1.0, step=0, max_lag=0, routing=routing) for one in trajectories]
    batch = concatenate([sequence for rows in packable for sequence in rows])
    gap, disagreement = seen_by_the_learner(model, batch)
    gap_without, _ = seen_by_the_learner(model, dataclasses.replace(batch, experts_TLK=None))
    if dtype == "float32":
        assert disagreement == 0.0
        assert max(gap, gap_without) < 1e-5
    else:
        assert disagreement > 0.001
        assert gap < 0.9 * gap_without


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_replays_and_reports(terminals: Terminals, dtype: Any) -> None:
    random = {**MODEL["random"], "config": MANY_EXPERTS}
    recipe = write_recipe(
        terminals.directory("run"),
        model={"random": random},
        algorithm={"router_replay": True},
        engine={"dtype": dtype},
        staleness={"max_lag": 0},
        learner={"steps": STEPS, "groups_per_step": 4, "group_size": 4},
    )
    terminals.open("run", "run", recipe).succeeds()
    run = terminals.root / "run" / "runs" / "tiny"
    check_trained(run, steps=STEPS, trajectories_per_step=16, max_lag=0)
    shares = [step["algorithm"]["router_disagreement"] for step in lines(run / "metrics.jsonl")]
    assert len(shares) == STEPS
    mean = np.mean(shares)  # a step alone may have few tokens near a border between experts
    assert mean < 1e-3 if dtype == "float32" else mean > 1e-3
