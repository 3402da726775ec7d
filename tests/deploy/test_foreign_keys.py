"""Keys of verl and TRL are refused with Headway's own, or with the reason why there is none, all at once."""

from pathlib import Path

import pytest

from headway.broker.errors import ConfigError
from headway.deploy.cli.main import answer
from headway.deploy.recipe.resolve import load_recipe

RECIPE = """
model: {path: somewhere}
prompts: {kind: arithmetic}
rewards: [{kind: arithmetic}]
"""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def refusal(directory: Path, *overrides: str, more: str = "") -> str:
    path = directory / "own.yaml"
    path.write_text(RECIPE + more)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("data.train_batch_size", "; did you mean learner.groups_per_step?"),
        ("actor_rollout_ref.model.path", "; did you mean model.path?"),
        (f"{ACTOR}.optim.lr", "; did you mean optimizer.learning_rate?"),
        (f"{ACTOR}.ppo_epochs", ". Each sample is trained once."),
        (f"{ACTOR}.megatron.tensor_model_parallel_size", "; did you mean learner.layout.tensor?"),
        (f"{ROLLOUT}.tensor_model_parallel_size", "; did you mean engine.options.tensor_parallel_size?"),
        (f"{ROLLOUT}.val_kwargs.n", "; did you mean evaluation.samples?"),
        (f"+{ROLLOUT}.engine_kwargs.vllm.seed", "; did you mean engine.options?"),
        ("algorithm.kl_ctrl.kl_coef", "; did you mean algorithm.kl.coefficient?"),
        ("reward_model.rollout.name", "; did you mean scorers.engine?"),
        ("custom_reward_function.path", "; did you mean rewards?"),
        (f"{ACTOR}.megatron.sequence_parallel", ". Megatron's settings are those of learner.layout and"),
        (f"{ACTOR}._target_", ". It names a class of verl's configuration; a recipe has no such key."),
        ("trainer.esi_redundant_time", ". Valid here: run, prompts, rewards,"),
        ("temperature", "; did you mean sampling.temperature?"),
        ("dtype", "; did you mean model.dtype?"),
        ("entropy_coef_min", ". algorithm.entropy_coefficient is fixed:"),
        ("evaluation.min_p", ". Responses are sampled by sampling.temperature, top_p and top_k."),
    ],
)
def test_another_trainer_s_key_is_answered(tmp_path: Path, key: str, told: str) -> None:
    path = "algorithm.kl_ctrl" if "kl_ctrl" in key else key.partition(".")[0] if key.startswith("custom") else key
    assert refusal(tmp_path, f"{key}=1").startswith(f"own.yaml: unknown key {path}{told}")


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("reward.weight", "; did you mean rewards?"),
        ("reward.overlong_buffer", "; did you mean algorithm.reward.overlong_buffer?"),
        ("critic.learning_rate", "; did you mean algorithm.critic.learning_rate?"),
        ("+critic.path", "; did you mean algorithm.critic.path?"),
        ("data", ". Valid here: run, prompts, rewards,"),
    ],
)
def test_a_slip_in_a_section_of_verl_s_name_is_answered_with_a_key_of_headway_s(
    tmp_path: Path, key: str, told: str
) -> None:
    assert refusal(tmp_path, f"{key}=1").startswith(f"own.yaml: unknown key {key}{told}")


def test_rewards_written_without_their_last_letter_are_told_so(tmp_path: Path) -> None:
    assert refusal(tmp_path, more="reward: [{kind: arithmetic}]\n") == (
        "own.yaml: unknown key reward; did you mean rewards?"
    )


def test_all_unknown_keys_are_told_at_once_those_with_one_answer_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(RECIPE + "data: {truncation: error, train_batch_size: 64}\n")
    overrides = ["data.filter_overlong_prompts=True", "learner.stepz=3"]
    assert answer(["run", "own.yaml", *overrides]) == 1
    first, no_cut, counted, misspelt = capsys.readouterr().err.splitlines()
    assert first == "Error: own.yaml has 4 unknown keys:"
    assert no_cut.startswith("  data.truncation, data.filter_overlong_prompts. No prompt is cut")
    assert counted.startswith("  data.train_batch_size; did you mean learner.groups_per_step?")
    assert misspelt == "  learner.stepz; did you mean learner.steps?"


def test_a_whole_configuration_of_unknown_settings_is_told_in_short(tmp_path: Path) -> None:
    names = ", ".join(f"x{number}: 1" for number in range(300))
    told = refusal(tmp_path, more=f"trainer: {{{names}}}\n")
    assert told.startswith("own.yaml has 300 unknown keys:\ntrainer.x0, trainer.x1,")
    assert "trainer.x19 and 280 more. Valid here: run, prompts, rewards," in told


def test_keys_of_headway_s_own_sections_are_answered_by_their_last_name(tmp_path: Path) -> None:
    assert "algorithm.critic.learning_rate?" in refusal(tmp_path, "algorithm.critic.lr=1")
    assert "algorithm.objective.options.beta?" in refusal(tmp_path, "algorithm.objective.beta=1")
    assert "algorithm.aggregation.kind?" in refusal(tmp_path, "prompts.loss_agg_mode=token-mean")
    assert "stages[0].loss_type. Valid here: kind," in refusal(tmp_path, "stages=[{kind: dpo, loss_type: ipo}]")


def test_a_command_without_a_recipe_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["run", "data.train_batch_size=64", "trainer.save_freq=20"]) == 1
    assert capsys.readouterr().err.startswith("Error: 'data.train_batch_size=64' stands where the recipe is")
