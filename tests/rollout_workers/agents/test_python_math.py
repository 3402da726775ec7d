"""Tasks of reasoning-gym with a Python tool: code runs in a sandbox, and the task's verifier judges."""

from typing import Any

import pytest

from headway.broker.user_code.import_paths import ImportRoots
from headway.learner.config import PromptsConfig
from headway.learner.data.prompts import open_source
from headway.rollout_workers.agents.conversation import Message
from headway.rollout_workers.agents.episode import AgentTask
from headway.rollout_workers.agents.kinds import open_agent
from headway.rollout_workers.rewards.base import RewardError

from .sandbox_kinds import HERE, found
from .test_tasks import Says, Stage, play, said


def chain(position: int) -> AgentTask:
    item = open_source(PromptsConfig(kind="reasoning_gym", path="chain_sum"), 0).train(0, position)
    messages = [{"role": "user", "content": str(item.content)}]
    return AgentTask(
        id="t",
        text=str(item.content),
        messages=messages,
        ground_truth=item.ground_truth,
        data_source=item.data_source,
        extra_info=item.extra_info,
    )


def computes(task: AgentTask, code: str = "print({expression})") -> Any:
    expression = task.extra_info["entry"]["metadata"]["expression"]

    def player(messages: list[Message]) -> Says:
        if messages[-1]["role"] != "tool":
            return "python", {"code": code.replace("{expression}", expression)}
        return f"So it is <answer>{said(messages).strip()}</answer>."

    return player


@pytest.mark.parametrize("kind", HERE)
async def test_what_code_prints_is_the_answer(kind: str) -> None:
    known = await found(kind)
    if isinstance(known, str):
        pytest.skip(known)
    agent = open_agent("python_math", {"sandbox": kind, "sandbox_options": {"seconds": 600}}, ImportRoots())
    task = chain(3)
    try:
        outcome = await play(agent, computes(task), task)
        assert (outcome["reward"], outcome["tool_calls"]) == (1.0, 1.0)
        wrong = await play(agent, computes(task, "print(1 + {expression})"), task)
        assert (wrong["reward"], wrong["tool_errors"]) == (0.0, 0.0)
        stage = Stage(computes(task, "1 / 0"))
        failed = await agent.rollout(stage.episode, task)
        assert isinstance(failed, dict)
        assert (failed["reward"], failed["tool_errors"]) == (0.0, 1.0)
        assert "ZeroDivisionError" in said(stage.asked[1]["messages"])
        assert (await play(agent, lambda _: "", task))["reward"] == 0.0
        with pytest.raises(RewardError, match="extra_info"):
            await play(agent, lambda _: "<answer>1</answer>", AgentTask(id="t", text="x", messages=task.messages))
    finally:
        await agent.close()
