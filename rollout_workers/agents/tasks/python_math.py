"""Tasks of reasoning-gym with a tool `python`, which runs the model's code in a sandbox.

Prompts come from `prompts.kind: reasoning_gym`. The task's own verifier judges the last `<answer>...</answer>`.
"""

import asyncio
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headway.broker.schema import Prompt
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.conversation import begin
from headway.rollout_workers.agents.episode import Agent, AgentEpisode, AgentTask, Outcome
from headway.rollout_workers.agents.sandbox import Ran, Sandbox, Sandboxes, SandboxOptions, open_sandboxes
from headway.rollout_workers.agents.tools.text_tools import TextTool
from headway.rollout_workers.agents.tools.toolbox import Toolbox, ToolError, ToolTurns
from headway.rollout_workers.rewards import check_installed
from headway.rollout_workers.rewards.reasoning_gym_reward import ReasoningGymReward

JUDGE_S = 30.0
STATE = {
    True: "Names that earlier calls defined are kept.",
    False: "Each call begins afresh: nothing of earlier calls is kept.",
}
SUBSET = " Only a subset of Python is there: no third-party packages, few modules of the standard library."


class PythonMathOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The sandbox, and what the model is told."""

    sandbox: Literal["monty", "sandlock", "bubblewrap", "container"] = "monty"
    sandbox_options: SandboxOptions = SandboxOptions()
    instructions: str = (
        "Compute with the tool `python`, which shows what the code prints. Then give the result as"
        " <answer>RESULT</answer>."
    )
    """The system message; empty: none."""
    max_turns: Annotated[int, Meta(ge=1, le=1000)] = 8
    """The most answers of the model."""
    shown_characters: Annotated[int, Meta(ge=1, le=1_000_000)] = 2000
    """The most characters of an output that the model reads."""
    partial_credit: bool = False
    """The verifier's own score, where it gives one between 0 and 1, in the place of 0."""


class PythonMath(Agent):
    """Reward 1 for an answer that the verifier finds entirely right, else 0, or `partial_credit`."""

    def __init__(self, options: PythonMathOptions, roots: ImportRoots, where: str) -> None:
        """Raises ConfigError if reasoning-gym is not installed."""
        check_installed(
            "reasoning_gym", key=f"{where.removesuffix('.options')}.kind=python_math, which needs rewards.kind"
        )
        self._options = options
        self._judge = ReasoningGymReward(JUDGE_S)
        self._opening = asyncio.Lock()
        self._sandboxes: Sandboxes | None = None

    async def rollout(self, episode: AgentEpisode, task: AgentTask) -> Outcome:
        """Play one episode. Raises ConfigError where the sandbox does not confine code on this machine, and RewardError
        for a prompt that is no task of reasoning-gym."""
        async with (await self._opened()).open() as sandbox:
            messages, tool = begin(task.messages, self._options.instructions), python_tool(sandbox, self._options)
            toolbox = Toolbox([tool])
            turns = ToolTurns(episode, messages, toolbox, self._options.max_turns)
            answer = await turns.answer()
        reward = await self._reward(task, answer or "")
        return {"reward": reward, **toolbox.measures}

    async def check(self) -> None:
        """See Agent. Raises ConfigError where the sandbox does not confine code on this machine."""
        await self._opened()

    async def close(self) -> None:
        """End the verifiers' process."""
        await self._judge.close()

    async def _reward(self, task: AgentTask, answer: str) -> float:
        prompt = Prompt(group=task.id, token_ids=[], text=task.text, ground_truth=task.ground_truth,
                        data_source=task.data_source, extra_info=task.extra_info, num_samples=1)  # fmt: skip
        score = (await self._judge.score(prompt, answer, "stop")).total if answer else 0.0
        return min(max(score, 0.0), 1.0) if self._options.partial_credit else float(score >= 1.0)

    async def _opened(self) -> Sandboxes:
        async with self._opening:
            if self._sandboxes is None:
                self._sandboxes = await open_sandboxes(self._options.sandbox, self._options.sandbox_options)
        return self._sandboxes


def python_tool(sandbox: Sandbox, options: PythonMathOptions) -> TextTool:
    """Return the tool that runs code in this sandbox."""

    async def python(code: str) -> str:
        ran = await sandbox.run(code)
        if ran.outcome != "ok":
            raise ToolError(shown(ran)[-options.shown_characters :])  # the end of an error names its cause
        return shown(ran)[: options.shown_characters]

    says = f"Runs Python code, and returns what it prints. {STATE[sandbox.keeps_state]}"
    subset = SUBSET if sandbox.kind == "monty" else ""
    description = f"{says}{subset} A call may take {sandbox.options.seconds:g} seconds."
    return TextTool(python, description, {"code": "The code. Print what you want to see."})


def shown(ran: Ran) -> str:
    """Return a run as the model reads it."""
    parts = [part.rstrip("\n") for part in (ran.output, ran.error) if part.strip()]
    if ran.outcome not in ("ok", "raised"):
        parts.append(f"Error: {ran.outcome}")
    return "\n".join(parts) or ("(no output)" if ran.outcome == "ok" else "Error: the code ended with an error.")
