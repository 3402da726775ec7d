"""Whole batches from the embedded engine's decoder, in this thread: all samples at once, forward by forward."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headway.broker.schema import Group, Prompt, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.roles.trained_model import own_decoding
from headway.learner.config import ModelConfig
from headway.rollout_workers.decoding import response_text
from headway.rollout_workers.engines.base import FinishReason, GenerationRequest, NamedTensors
from headway.rollout_workers.engines.embedded.decoder import Decoder, Sample, Sampler
from headway.rollout_workers.engines.embedded.slot_cache import ATTENTION
from headway.rollout_workers.engines.weight_loading.named_tensors import load_tensors
from headway.rollout_workers.rewards import Score, open_reward

CPU = torch.device("cpu")


class Rollouts:
    """A policy that samples. A batch depends on its weights, prompts and seed alone."""

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation=ATTENTION)
        self._model = model.eval().requires_grad_(False)
        self._version = WeightVersion(0, 0)
        self._decoding = own_decoding(ModelConfig(path=str(model_dir)), recipe.sampling)
        self._scorer = asyncio.run(open_reward(recipe.rewards))
        self._sampling = recipe.sampling
        self._max_model_len = recipe.engine.max_model_len

    def load(self, version: WeightVersion, tensors: NamedTensors) -> None:
        """Sample from these weights from now on."""
        load_tensors(self._model, tensors)
        self._version = version

    def sample(self, prompts: Sequence[Prompt], seed: int) -> list[Group]:
        """Return `num_samples` responses to each prompt, scored."""
        samples = [self._sample(prompt) for prompt in prompts for _ in range(prompt.num_samples)]
        decoder = Decoder(self._model, len(samples), self._max_model_len, Sampler(seed, CPU), CPU, self._version)
        for sample in samples:
            decoder.add(sample)
        while decoder.running:
            decoder.step()
        trajectories = iter(self._trajectories(prompts, samples))
        return [
            Group(prompt=prompt, round=0, trajectories=tuple(islice(trajectories, prompt.num_samples)))
            for prompt in prompts
        ]

    def _sample(self, prompt: Prompt) -> Sample:
        request = GenerationRequest(
            request_id=prompt.group,
            prompt_tokens=prompt.token_ids,
            max_new_tokens=self._sampling.max_new_tokens,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            stop_token_ids=list(self._decoding.stop_token_ids),
        )
        limit = min(len(prompt.token_ids) + request.max_new_tokens, self._max_model_len)
        return Sample(request, limit, list(prompt.token_ids))

    def _trajectories(self, prompts: Sequence[Prompt], responses: Sequence[Sample]) -> Iterator[Trajectory]:
        """Yield trajectories in the prompts' order, each as many times as it has samples."""
        places = [(prompt, index) for prompt in prompts for index in range(prompt.num_samples)]
        scores = asyncio.run(self._scores([prompt for prompt, _ in places], responses))
        for (prompt, index), response, score in zip(places, responses, scores, strict=True):
            yield Trajectory(
                tid=TrajectoryId(prompt.group, 0, index),
                prompt_tokens=np.asarray(prompt.token_ids, np.int32),
                response_tokens=np.asarray(response.response, np.int32),
                behavior_logprobs=np.asarray(response.logprobs, np.float32),
                loss_mask=np.ones(len(response.logprobs), np.uint8),
                spans=(VersionSpan(0, len(response.logprobs), self._version),),
                reward=score.total,
                rewards=dict(score.components),
                finish_reason=reason_of(response),
                worker="study",
            )

    async def _scores(self, prompts: Sequence[Prompt], responses: Sequence[Sample]) -> list[Score]:
        texts = [response_text(self._decoding, response.response) for response in responses]
        asked = zip(prompts, texts, map(reason_of, responses), strict=True)
        return [await self._scorer.score(prompt, text, reason) for prompt, text, reason in asked]


def reason_of(response: Sample) -> FinishReason:
    """Return the reason why the response ended."""
    assert response.finish_reason is not None
    return response.finish_reason
