"""The race's rewards as verl's workers load them: a reward manager, as only one of those sees a response's tokens."""

import os
import time
from typing import Any

import msgspec
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from benchmarks.peers.of_trl import Clock, Verifier
from benchmarks.peers.of_verl import RACE
from benchmarks.peers.race import Race


class RaceRewards(RewardManagerBase):  # type: ignore[misc]  # verl is not in the environment of the type checker
    """Scores one response at a time with the race's verifier."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{key: options[key] for key in ("config", "tokenizer", "compute_score")})
        race = msgspec.json.decode(os.environ[RACE], type=Race)
        self._verifier = Verifier(race.load(), race.model, Clock(time.time()))

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Return the reward of the last response of `data`, a DataProto."""
        sample = data[-1]
        ids = sample.batch["responses"]
        count = int(sample.batch["attention_mask"][-ids.shape[-1] :].sum())
        extra = sample.non_tensor_batch["extra_info"]
        (reward,) = await self._verifier.score(
            prompts=[extra["text"]],
            completion_ids=[ids[:count].tolist()],
            ground_truth=[sample.non_tensor_batch["reward_model"]["ground_truth"]],
            data_source=[sample.non_tensor_batch["data_source"]],
            extra=[extra["facts"]],
        )
        return {"reward_score": reward, "reward_extra_info": {}}
