"""The ways in: each kind of agent implements `episode.Agent` on top of what an episode offers.

    agent.kind                 who plays                                       the episode's reward
    package.module:rollout     own.py: your own function or class              what it returns
    tools                      tools.py: the model, with Python functions      the run's reward functions
    environment_factory        a class whose public methods are tools (TRL)    get_reward()
    environment                a class with reset, step and close              of each step
    skyrl_gym                  a BaseTextEnv of SkyRL-Gym's shape              of each step
    openenv                    a server that speaks OpenEnv's protocol         of each step
    textarena                  a single-player game of TextArena               the player's
    verl_agent_loop            a class of the shape of verl's AgentLoop        reward_score
    mcp                        the model, with the tools of MCP servers        the run's reward functions
    one of TASKS               a task that ships (`agents/tasks/`)            the task's
    external                   an agent that no worker starts (`external.py`)         what it ends with
    command                    a program that knows nothing of Headway         the last line of its output

    turns.py      the loop of environments that answer in text; that of tools is `tools.toolbox.ToolTurns`

A kind imports nothing of the package whose shape it takes, unless it must, and then in the function that needs it.

The invariant: an episode that ends, fails or is cancelled leaves nothing behind, and what an environment returns that
its kind does not understand is an error that names it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from headway.broker.user_code.import_paths import ImportRoots
from headway.broker.user_code.kinds import typed_options, unknown_kind
from headway.rollout_workers.agents.episode import Agent, Resume
from headway.rollout_workers.agents.external import EXTERNAL, ExternalOptions
from headway.rollout_workers.agents.tasks import TASKS, task_parts

from .base import ShapeError, check_program

KINDS = (
    *("command", "environment", "environment_factory", EXTERNAL, "mcp", "openenv"),
    *("skyrl_gym", "textarena", "tools", "verl_agent_loop"),
    *TASKS,
)
CODE = {
    "environment": "environment",
    "environment_factory": "factory",
    "skyrl_gym": "environment",
    "verl_agent_loop": "loop",
}
"""The option of a kind that is an import path."""


def open_agent(kind: str, options: Mapping[str, Any], roots: ImportRoots, where: str = "agent") -> Agent:
    """Open the agent of a kind, in the process that plays its episodes. `where`: its key in the recipe.

    Raises ConfigError for an unknown kind or option, and for what may not be imported or run, or lacks a member.
    """
    if ":" in kind:
        from .own import OwnAgent

        return OwnAgent(kind, options, roots, where)
    of, agent = _parts(kind, where)
    made: Agent = agent(typed_options(options, of, f"{where}.options"), roots, f"{where}.options")
    return made


def check_agent(kind: str, options: Mapping[str, Any], where: str = "agent") -> None:
    """Raise ConfigError for an unknown kind or option; nothing of the user's own is imported."""
    if kind == EXTERNAL:
        typed_options(options, ExternalOptions, f"{where}.options")
    elif ":" not in kind:
        typed_options(options, _parts(kind, where)[0], f"{where}.options")


def named_by(kind: str, options: Mapping[str, Any], where: str = "agent") -> Iterator[tuple[str, str]]:
    """Yield (key, name) of all import paths and programs that an agent's settings name, which only an operator may
    allow: `check_named` checks one."""
    if ":" in kind:
        yield f"{where}.kind", kind
    if kind == "tools":
        yield from ((f"{where}.options.tools", path) for path in options.get("tools", ()))
    if kind in CODE and ":" in str(options.get(CODE[kind], "")):
        yield f"{where}.options.{CODE[kind]}", options[CODE[kind]]
    if kind == "command" and options.get("command"):
        yield f"{where}.options.command", options["command"][0]
    if kind == "mcp":
        for name, server in options.get("servers", {}).items():
            if server.get("command"):
                yield f"{where}.options.servers.{name}.command", server["command"][0]


def check_named(name: str, roots: ImportRoots, where: str) -> None:
    """Raise ConfigError where an import path may not be imported, or a program not be run; it imports nothing."""
    if ":" in name:
        roots.check(name, where)
    else:
        check_program([name], roots, where)


def _parts(kind: str, where: str) -> tuple[type[msgspec.Struct], Any]:
    """Return the options of a kind and its class. Raises ConfigError for an unknown kind."""
    match kind:
        case "command":
            from .command import CommandAgent, CommandOptions

            return CommandOptions, CommandAgent
        case "environment":
            from .environment import EnvironmentAgent, EnvironmentOptions

            return EnvironmentOptions, EnvironmentAgent
        case "environment_factory":
            from .environment_factory import EnvironmentFactoryAgent, EnvironmentFactoryOptions

            return EnvironmentFactoryOptions, EnvironmentFactoryAgent
        case "mcp":
            from .mcp import McpAgent, McpOptions

            return McpOptions, McpAgent
        case "openenv":
            from .openenv import OpenEnvAgent, OpenEnvOptions

            return OpenEnvOptions, OpenEnvAgent
        case "skyrl_gym":
            from .skyrl_gym import SkyrlGymAgent, SkyrlGymOptions

            return SkyrlGymOptions, SkyrlGymAgent
        case "textarena":
            from .textarena import TextArenaAgent, TextArenaOptions

            return TextArenaOptions, TextArenaAgent
        case "tools":
            from .tools import ToolsAgent, ToolsOptions

            return ToolsOptions, ToolsAgent
        case "verl_agent_loop":
            from .verl_agent_loop import VerlAgentLoopAgent, VerlAgentLoopOptions

            return VerlAgentLoopOptions, VerlAgentLoopAgent
        case task if task in TASKS:
            return task_parts(task)
        case unknown:
            raise unknown_kind(unknown, KINDS, f"{where}.kind")


__all__ = [
    "KINDS",
    "Agent",
    "Resume",
    "ShapeError",
    "check_agent",
    "check_named",
    "named_by",
    "open_agent",
]
