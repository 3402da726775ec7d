"""Opens what plays a recipe's samples, of training and of evaluation alike: its agent, or its environment."""

from pathlib import Path
from typing import TYPE_CHECKING

from headway.broker.user_code.import_paths import ImportRoots
from headway.deploy.recipe.recipe import Recipe

if TYPE_CHECKING:
    from headway.rollout_workers.decoding import Decoding
    from headway.rollout_workers.rewards import Reward
    from headway.rollout_workers.samples.episode import Player


async def open_player(
    recipe: Recipe, reward: "Reward", decoding: "Decoding", model: Path, roots: ImportRoots
) -> "Player":
    """Open the player, which closes `reward`. `model`: the directory of the tokenizer. Raises ConfigError, and
    UserCodeError where the user's own code cannot be opened."""
    from headway.rollout_workers.environments import open_environment
    from headway.rollout_workers.samples.episode import Episodes

    if not recipe.agent.kind:
        return Episodes(await open_environment(recipe.environment, roots), reward, decoding)
    from headway.rollout_workers.agents.player import AgentPlayer

    return await AgentPlayer.open(
        recipe.agent,
        reward,
        decoding,
        model=model,
        name=recipe.run.name,
        trained_temperature=recipe.sampling.temperature,
        roots=roots,
    )
