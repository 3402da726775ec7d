"""python -m benchmarks.peers.of_trl ORDER RESULT

TRL's driver: its GRPOTrainer on the race's prompts, with the race's verifier, in an interpreter that has TRL. It
generates with transformers on a CPU, with vLLM in its own process on a GPU. ORDER and RESULT are files of JSON.
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.broker.schema import Prompt
from headway.deploy.recipe.recipe import Recipe

from . import trl_agents
from .figures import Figures, Step, figures_of
from .race import Race


class TrlSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One of TRL's settings that is tried."""

    threads: int | None = None
    """OMP_NUM_THREADS; None: as many as PyTorch takes by itself."""
    micro_batches: int = 1
    """Forward and backward passes of an update."""
    model: dict[str, Any] = {}
    """Arguments with which transformers loads the model."""


class TrlOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A run of TRL's trainer."""

    race: Race
    setting: TrlSetting
    model: str
    """The directory where it saves its model."""
    began: float
    """The time of the clock at which its command started."""
    server_gpu: str | None = None
    """The name of the GPU of a server that generates; None without one."""


class Clock:
    """Notes when steps end, and what the verifier saw and the engine took in each of them."""

    def __init__(self, began: float) -> None:
        self._began = began
        self.steps: list[Step] = []
        self._rewards: list[float] = []
        self._tokens = 0
        self._generating_s = 0.0

    def add_samples(self, rewards: Sequence[float], responses: Sequence[Sequence[int]]) -> None:
        """Note the rewards and the tokens of responses."""
        self._rewards += rewards
        self._tokens += sum(map(len, responses))

    def add_generation(self, seconds: float) -> None:
        """Note the time of a call that generated, in which nothing was trained."""
        self._generating_s += seconds

    def end_step(self) -> None:
        """End a step: all that was noted since the last one is its own, by all processes."""
        samples, tokens, rewards = summed(len(self._rewards), self._tokens, sum(self._rewards))
        self.steps.append(
            Step(
                end_s=time.time() - self._began,
                samples=round(samples),
                tokens=round(tokens),
                reward=rewards / max(1, samples),
                learner_idle_s=self._generating_s,
            )
        )
        self._rewards, self._tokens, self._generating_s = [], 0, 0.0


def summed(*values: float) -> list[float]:
    """Return the sums of these values over all processes of the trainer."""
    import torch
    from torch import distributed

    if not distributed.is_initialized():
        return list(values)
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    total = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return [float(value) for value in total.tolist()]


def prompts_of(recipe: Recipe, steps: int, tokenizer: Any) -> list[Prompt]:
    """Return the prompts of so many steps, those that Headway's cursor feeds, in its order."""
    from headway.learner.data.prompts import open_source
    from headway.learner.data.prompts.rendering import Renderer

    source, renderer = open_source(recipe.prompts, recipe.run.seed), Renderer(tokenizer, recipe.prompts.system_prompt)
    count, size = steps * recipe.learner.groups_per_step, recipe.learner.group_size
    return [renderer.prompt(source.train(0, at), group=f"race-{at}", num_samples=size) for at in range(count)]


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return the prompt as a row of TRL's data set, with all that the verifier needs."""
    return {
        "prompt": prompt.text,
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "extra": msgspec.json.encode(prompt.extra_info).decode(),
    }


def config_of(race: Race, setting: TrlSetting, directory: str) -> dict[str, Any]:
    """Return the arguments of GRPOConfig: the race's loss, optimizer and batch, and otherwise what is fastest."""
    recipe = race.load()
    on_gpu, optimizer, updates = race.on_gpu, recipe.optimizer, recipe.learner.updates_per_step
    passes = updates * setting.micro_batches
    return {
        "output_dir": directory,
        "max_steps": recipe.learner.steps * updates,
        "per_device_train_batch_size": race.samples_per_step // (passes * max(1, race.gpus)),
        "gradient_accumulation_steps": setting.micro_batches,
        "steps_per_generation": passes,
        "num_generations": recipe.learner.group_size,
        "max_completion_length": recipe.sampling.max_new_tokens,
        "temperature": recipe.sampling.temperature,
        "top_p": recipe.sampling.top_p,
        "loss_type": "dapo",  # the mean over all tokens, as the preset has it
        "beta": recipe.algorithm.kl.coefficient,
        "vllm_importance_sampling_correction": bool(recipe.algorithm.corrections),
        "router_aux_loss_coef": 0.0 if "moe" in _architecture(race) else None,
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "seed": recipe.run.seed,
        "shuffle_dataset": False,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "gradient_checkpointing": False,
        "use_vllm": on_gpu,
        **({"vllm_mode": "colocate", "vllm_max_model_length": recipe.engine.max_model_len} if on_gpu else {}),
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa", **setting.model},
        **(trl_agents.limits_of(recipe, is_of_turn=False) if trl_agents.is_of_agents(recipe) else {}),
        "save_strategy": "no",
        "logging_steps": recipe.learner.steps,
        "report_to": [],
        "disable_tqdm": True,
    }


def _architecture(race: Race) -> str:
    return str(msgspec.json.decode((race.model / "config.json").read_bytes())["model_type"])


class Verifier:
    """The race's rewards as TRL calls them, which also tell the clock what was sampled."""

    def __init__(self, recipe: Recipe, model: Path, clock: Clock) -> None:
        from headway.deploy.roles.trained_model import own_decoding
        from headway.learner.config import ModelConfig

        self._recipe = recipe
        self._is_of_agents = trl_agents.is_of_agents(recipe)
        self._clock = clock
        self._decoding = own_decoding(ModelConfig(path=str(model)), recipe.sampling)
        self._reward: Any = None

    async def score(
        self,
        prompts: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        ground_truth: Sequence[str],
        data_source: Sequence[str],
        extra: Sequence[str],
        completions: Sequence[Any] = (),
        **_others: Any,
    ) -> list[float]:
        """Return the rewards of these responses, of episodes the rewards of their last answers."""
        from headway.deploy.recipe.trust import roots_of
        from headway.rollout_workers.decoding import response_text
        from headway.rollout_workers.rewards import open_reward

        if self._reward is None:  # opened in the loop that uses it
            self._reward = await open_reward(self._recipe.rewards, roots_of(self._recipe))

        async def judge(text: str, ids: Sequence[int], truth: str, source: str, facts: str, response: str) -> float:
            asked = Prompt(
                group="race",
                token_ids=[],
                text=text,
                ground_truth=truth,
                data_source=source,
                extra_info=msgspec.json.decode(facts),
                num_samples=1,
            )
            reason = "stop" if ids and ids[-1] in self._decoding.stop_token_ids else "length"
            score = await self._reward.score(asked, response, reason, ids)
            return float(score.total)

        if self._is_of_agents:
            responses = trl_agents.last_answers(completions)
        else:
            responses = [response_text(self._decoding, ids) for ids in completion_ids]
        columns = zip(prompts, completion_ids, ground_truth, data_source, extra, responses, strict=True)
        rewards = await asyncio.gather(*[judge(*one) for one in columns])  # side by side, as Headway's workers do
        self._clock.add_samples(rewards, completion_ids)
        return rewards


class Judge:
    """The race's rewards as TRL's asynchronous trainer calls them, in a process to which it pickles them."""

    def __init__(self, race: Race) -> None:
        self._race = race
        self._verifier: Verifier | None = None

    async def __call__(self, prompts: Sequence[Sequence[dict[str, str]]], **columns: Any) -> list[float]:
        """Return the rewards of responses to these conversations, of whose only message the text has been rendered."""
        if self._verifier is None:
            self._verifier = Verifier(self._race.load(), self._race.model, Clock(time.time()))
        return await self._verifier.score(prompts=[messages[-1]["content"] for messages in prompts], **columns)


def run(order: TrlOrder) -> Figures:
    """Train, save the model, and return the figures."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    recipe, model, clock = order.race.load(), order.race.model, Clock(order.began)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    prompts = prompts_of(recipe, recipe.learner.steps, tokenizer)
    tokens = {prompt.text: list(prompt.token_ids) for prompt in prompts}
    updates = recipe.learner.updates_per_step
    verifier = Verifier(recipe, model, clock)
    is_of_agents = trl_agents.is_of_agents(recipe)

    async def score(**given: Any) -> list[float]:
        return await verifier.score(**given)

    class Steps(TrainerCallback):  # type: ignore[misc]  # transformers exports it lazily, without a type
        def on_step_end(self, _arguments: Any, state: Any, *_control: Any, **_options: Any) -> None:
            if state.global_step % updates == 0:
                clock.end_step()

    class Timed(GRPOTrainer):  # type: ignore[misc]  # TRL exports it lazily, without a type
        def _tokenize_prompts(self, texts: list[Any]) -> Any:
            if is_of_agents:
                return super()._tokenize_prompts(texts)
            return [tokens[text] for text in texts], None, {}  # those that Headway's model reads

        def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
            began = time.monotonic()
            try:
                return super()._generate_single_turn(*arguments, **options)
            finally:
                clock.add_generation(time.monotonic() - began)

    trainer = Timed(
        model=str(model),
        args=GRPOConfig(**config_of(order.race, order.setting, order.model)),
        reward_funcs=score,
        train_dataset=Dataset.from_list(
            trl_agents.rows_of(recipe, prompts, tokenizer) if is_of_agents else [row_of(prompt) for prompt in prompts]
        ),
        processing_class=tokenizer,
        environment_factory=trl_agents.factory_of(recipe) if is_of_agents else None,
        callbacks=[Steps()],
    )
    trainer.train()
    trainer.save_model(order.model)
    return figures_of(clock.steps)


def main() -> None:
    """Make the ordered run, and write its figures."""
    order, result = map(Path, sys.argv[1:])
    figures = run(msgspec.json.decode(order.read_bytes(), type=TrlOrder))
    if os.environ.get("RANK", "0") == "0":
        result.write_bytes(msgspec.json.encode(figures))


if __name__ == "__main__":
    main()
