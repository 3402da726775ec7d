"""verl's driver: `verl.trainer.main_ppo` in an interpreter that has verl, Ray and vLLM, on one GPU or two.

It trains as many samples in as many updates with the same loss, and hands weights over once a step. It wants the
package flash-attn. Where that is not installed, `verl_stand_ins.py` has the logprobs, which verl alone computes token
by token, and torch's variable-length kernel for its packed rows. Its engines keep their memory while it trains, and it
looks every 20 ms for samples that have ended, not every 2 s. Ray runs on this machine alone.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.processes import ROOT, finish_group, repeated
from headway.deploy.recipe.recipe import Recipe

from .figures import Figures, Step, figures_of
from .of_trl import prompts_of, row_of
from .race import Race

NAME = "verl-sync-packed"
RACE = "HEADWAY_RACE"
"""The environment variable with the race, as JSON, for `verl_rewards.py`."""
NO_DUAL_CLIP = 1e6
MOST_SEQUENCES = 1024
"""The most that an engine of verl generates at a time. vLLM by itself records graphs of up to 512, 51 of them twice."""
HERE = Path(__file__).parent
ATTENTION = "race_varlen"
"""The name of the attention that `verl_attention.py` registers with transformers."""
IN_PROCESSES = {
    "VERL_LOGGING_LEVEL": "WARNING",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    # Many processes import at once: Ray's own times to wait, 15 and 30 seconds, are short for a cold machine.
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_worker_register_timeout_seconds": "180",
    # As many processes as the machine has processors, none of which has verl's environment: Ray starts others.
    "RAY_prestart_worker_first_driver": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    # verl turns it off unless it is set, for files that broke when two wrote them; since torch 2.10 they cannot.
    "VLLM_DISABLE_COMPILE_CACHE": "0",
    "HF_HUB_OFFLINE": "1",
}
"""The environment of verl's command, unless it is set otherwise; Ray's processes inherit it."""
LOOK_S = 0.05
Line = tuple[float, dict[str, float]]
"""The time of the clock at which the metrics of a step were written, and the metrics."""


def write_prompts(race: Race, file: Path) -> None:
    """Write the race's prompts as verl reads them: conversations, and all that the verifier needs.

    The model's chat template makes of them what Headway feeds. Raises ConfigError for a model without such a template.
    """
    from pyarrow import Table, parquet
    from transformers import AutoTokenizer

    from headway.learner.data.prompts import open_source

    recipe = race.load()
    tokenizer = AutoTokenizer.from_pretrained(race.model)
    source = open_source(recipe.prompts, recipe.run.seed)
    rows = []
    for at, prompt in enumerate(prompts_of(recipe, recipe.learner.steps, tokenizer)):
        messages = [
            {"role": "system", "content": recipe.prompts.system_prompt},
            {"role": "user", "content": source.train(0, at).content},
        ]
        read = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert read == prompt.text, "verl's model must read what Headway's reads"
        row = row_of(prompt)
        rows.append(
            {
                "prompt": messages,
                "data_source": row["data_source"],
                "reward_model": {"style": "rule", "ground_truth": row["ground_truth"]},
                "extra_info": {"index": at, "text": row["prompt"], "facts": row["extra"]},
            }
        )
    parquet.write_table(Table.from_pylist(rows), file)


def overrides_of(race: Race, directory: Path) -> list[str]:
    """Return the overrides of verl's configuration, in Hydra's syntax."""
    recipe = race.load()
    return [
        *_of_data(recipe, directory),
        *_of_actor(recipe, race.model),
        *_of_rollout(recipe, race),
        *_of_trainer(recipe, race, directory),
        "+ray_kwargs.ray_init.include_dashboard=False",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        # The ratio's denominator: what the engine said, or what the learner computes before the step.
        f"algorithm.rollout_correction.bypass_mode={recipe.algorithm.objective.anchor == 'behavior'}",
        "reward.reward_manager.source=importlib",
        "reward.reward_manager.name=RaceRewards",
        f"reward.reward_manager.module.path={HERE / 'verl_rewards.py'}",
    ]


def _of_data(recipe: Recipe, directory: Path) -> list[str]:
    response = recipe.sampling.max_new_tokens
    return [
        f"data.train_files={directory / 'prompts.parquet'}",
        f"data.val_files={directory / 'prompts.parquet'}",
        f"data.train_batch_size={recipe.learner.groups_per_step}",
        f"data.max_prompt_length={recipe.engine.max_model_len - response}",
        f"data.max_response_length={response}",
        "data.shuffle=False",
        "data.filter_overlong_prompts=False",
        "data.dataloader_num_workers=0",
    ]


def _of_actor(recipe: Recipe, model: Path) -> list[str]:
    actor, optimizer = "actor_rollout_ref.actor", recipe.optimizer
    return [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=True",
        f"actor_rollout_ref.model.external_lib={__package__}.verl_stand_ins",
        f"+actor_rollout_ref.model.override_config.attn_implementation={ATTENTION}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.ppo_mini_batch_size={recipe.learner.groups_per_step // recipe.learner.updates_per_step}",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu={recipe.learner.micro_batch_tokens}",
        f"{actor}.fsdp_config.reshard_after_forward=False",
        f"{actor}.clip_ratio_c={NO_DUAL_CLIP}",
        f"{actor}.optim.clip_grad={optimizer.max_grad_norm}",
        f"{actor}.optim.lr={optimizer.learning_rate}",
        f"{actor}.optim.betas=[{optimizer.beta1},{optimizer.beta2}]",
        f"{actor}.optim.weight_decay={optimizer.weight_decay}",
        f"{actor}.optim.override_optimizer_config={{eps:{optimizer.epsilon}}}",
        f"{actor}.checkpoint.save_contents=[model,hf_model]",
    ]


def _graphed(sequences: int) -> list[int]:
    """Return the batches whose CUDA graphs an engine records: finer where one more row costs more."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 257, 32), *range(320, MOST_SEQUENCES + 1, 64)]
    fewer = [size for size in sizes if size < sequences]
    return [*fewer, sizes[len(fewer)]]


def _of_rollout(recipe: Recipe, race: Race) -> list[str]:
    rollout = "actor_rollout_ref.rollout"
    sequences = min(MOST_SEQUENCES, race.samples_per_step // max(1, race.gpus))
    return [
        f"{rollout}.name=vllm",
        f"{rollout}.n={recipe.learner.group_size}",
        f"{rollout}.temperature={recipe.sampling.temperature}",
        f"{rollout}.top_p={recipe.sampling.top_p}",
        f"{rollout}.dtype={recipe.engine.dtype}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.max_model_len={recipe.engine.max_model_len}",
        f"{rollout}.max_num_seqs={MOST_SEQUENCES}",
        f"{rollout}.cudagraph_capture_sizes={_graphed(sequences)}".replace(" ", ""),
        f"{rollout}.gpu_memory_utilization=0.3",
        f"{rollout}.free_cache_engine=False",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=1024",
    ]


def _of_trainer(recipe: Recipe, race: Race, directory: Path) -> list[str]:
    return [
        "trainer.v1.trainer_mode=sync",
        f"trainer.v1.sampler.custom_sampler.path={HERE / 'verl_samplers.py'}",
        "trainer.v1.sampler.custom_sampler.name=OftenSync",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={race.gpus}",
        f"trainer.total_training_steps={recipe.learner.steps}",
        f"trainer.save_freq={recipe.learner.steps}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file]",
        "trainer.project_name=race",
        "trainer.experiment_name=sync",
        f"trainer.default_local_dir={directory / 'checkpoints'}",
    ]


def environment_of(race: Race, directory: Path) -> dict[str, str]:
    """Return the environment of verl's command."""
    paths = (str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]))
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "VERL_FILE_LOGGER_PATH": str(directory / "metrics.jsonl"),
        RACE: msgspec.json.encode(race).decode(),
    }
    return {**IN_PROCESSES, **os.environ, **own}


def drive(race: Race, python: Path, timeout_s: float) -> tuple[Figures, Path]:
    """Make the run, and return its figures and the directory of its model.

    Raises CalledProcessError or TimeoutExpired, its output on stderr.
    """
    directory, began = Path(race.output) / NAME, time.time()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    write_prompts(race, directory / "prompts.parquet")
    command = (str(python), "-W", "ignore", "-m", "verl.trainer.main_ppo", *overrides_of(race, directory))
    with following(directory / "metrics.jsonl") as lines:
        finish_group(command, timeout_s, environment_of(race, directory), directory)
    steps = race.load().learner.steps
    model = directory / "checkpoints" / f"global_step_{steps}" / "actor" / "huggingface"
    return figures_from(lines, began, race.samples_per_step), model


@contextmanager
def following(file: Path) -> Iterator[list[Line]]:
    """Read lines of metrics as they are written, until the end of the block; they stand in the list that it gives."""
    lines: list[Line] = []

    def read() -> None:
        if not file.exists():
            return
        for line in file.read_text().splitlines(keepends=True)[len(lines) :]:
            if line.endswith("\n"):
                lines.append((time.time(), json.loads(line)["data"]))

    with repeated(read, LOOK_S):
        yield lines
    read()


def figures_from(lines: Sequence[Line], began: float, samples: int) -> Figures:
    """Return the figures of lines of metrics. The last step's time to save the model does not count."""
    steps = [
        Step(
            end_s=at - began - metrics.get("timing_s/save_checkpoint", 0.0),
            samples=samples,
            tokens=round(samples * metrics["response_length/mean"]),
            reward=metrics["critic/score/mean"],
            learner_idle_s=metrics["timing_s/gen"],
        )
        for at, metrics in lines
    ]
    return figures_of(steps)
