"""PPO's critic starts from a reward model, if the recipe names one that fits."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.broker.errors import ConfigError
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.recipe_backends import recipe_critic
from headway.learner.backends import open_backend
from headway.learner.batching.packing import concatenate
from headway.learner.ranks import Ranks
from headway.learner.stages.reward_model import with_state_behind
from tests.end_to_end.recipes import TINY, write_recipe
from tests.learner.preferences import MODEL
from tests.learner.scoring import by_transformers, responses
from tests.learner.tiny import ALPHABET, OPTIMIZER


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a reward model that was trained for a step."""
    directory = tmp_path_factory.mktemp("scores") / "left"
    backend = open_backend("fsdp", MODEL, OPTIMIZER, seed=3, head="score")
    row = concatenate([with_state_behind(tokens) for tokens in responses(5, 9)])
    backend.step([row], lambda _, values_T: (-(values_T * row.loss_mask_T).sum(), {}), 1e-2)
    backend.save(directory)
    return directory


def recipe_with(path: Path, directory: Path, alphabet: str = ALPHABET) -> Recipe:
    """Return PPO's recipe for a policy of another architecture, whose critic starts from the model at `path`."""
    random = {**TINY["model"]["random"], "alphabet": alphabet}
    algorithm = {"preset": "ppo", "critic": {"path": str(path)}}
    return load_recipe(write_recipe(directory, model={"random": random}, algorithm=algorithm))


def test_the_critic_of_ppo_starts_with_the_scores_of_its_reward_model(reward_model: Path, tmp_path: Path) -> None:
    recipe = recipe_with(reward_model, tmp_path)
    policy = open_backend("fsdp", recipe.model, OPTIMIZER)
    critic = recipe_critic(recipe, Ranks.of(policy))
    texts = responses(9, 14, 6)
    (whole,) = critic.values([concatenate([with_state_behind(tokens) for tokens in texts])])
    expected = by_transformers(reward_model, texts)
    ends = torch.tensor([len(tokens) + 1 for tokens in texts]).cumsum(0) - 1
    torch.testing.assert_close(whole[ends], expected, rtol=0, atol=1e-4)
    prefix = by_transformers(reward_model, [texts[0][:4], texts[0]])[0]  # V(s_t) is the score of the tokens before t
    assert whole[4].item() == pytest.approx(prefix.item(), abs=1e-4)


@pytest.mark.parametrize(
    ("alphabet", "is_policy", "told"),
    [(ALPHABET + "?", False, "has another vocabulary"), (ALPHABET, True, "is no reward model: it has no tensor score")],
)
def test_a_critic_that_does_not_fit_is_refused(
    alphabet: str, is_policy: bool, told: str, reward_model: Path, tmp_path: Path
) -> None:
    if is_policy:
        open_backend("fsdp", MODEL, OPTIMIZER).save(tmp_path / "policy")
    path = tmp_path / "policy" if is_policy else reward_model
    recipe = recipe_with(path, tmp_path, alphabet)
    with pytest.raises(ConfigError, match=told):
        recipe_critic(recipe, Ranks(0, 1, 0, 1, is_lead=True))


@pytest.mark.parametrize(
    ("name", "shape"), [("score.weight", (3, 64)), ("model.layers.0.self_attn.q_proj.weight", (8, 64))]
)
def test_tensors_of_another_shape_are_refused_with_their_key(
    name: str, shape: tuple[int, ...], reward_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(reward_model, broken)
    tensors = load_file(broken / "model.safetensors")
    assert name in tensors
    save_file({**tensors, name: torch.zeros(shape)}, broken / "model.safetensors", metadata={"format": "pt"})
    told = rf"algorithm\.critic\.path: .*broken cannot be the critic\. .*{name}.*leave the path out"
    with pytest.raises(ConfigError, match=told):
        recipe_critic(recipe_with(broken, tmp_path), Ranks(0, 1, 0, 1, is_lead=True))
