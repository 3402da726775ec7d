"""A recipe and its overrides name a stage: `stages.sft.phases=[]`, and `sft`, an older spelling of the warm-up."""

import re
from typing import Any

from omegaconf import DictConfig, ListConfig

from headway.broker.errors import ConfigError

_BY_NAME = re.compile(r"(?:stages\.(?P<name>[A-Za-z_][\w-]*)|(?P<older>sft))(?P<rest>[.\[].*)?", re.DOTALL)


def by_index(config: DictConfig, key: str) -> str:
    """Return the key with `stages.NAME`, or `sft`, as `stages[INDEX]`.

    A stage without a name has that of its kind, without the module of one of the user's own. A recipe without stages
    keeps the key, and a recipe whose stages have no `sft` keeps that. Raises ConfigError for a name that no stage or
    several stages have.
    """
    stages = config.get("stages")
    if not (found := _BY_NAME.fullmatch(key)) or not isinstance(stages, ListConfig) or not stages:
        return key
    name = found["name"] or found["older"]
    names = [_name_of(one) for one in stages]
    if found["older"] and name not in names:
        return key
    if names.count(name) != 1:
        told = f"{names.count(name)} stages have this name" if name in names else "no stage has this name"
        raise ConfigError(f"The override of {key[:200]!r}: {told}; the stages are {', '.join(names)}. Write stages[0].")
    return f"stages[{names.index(name)}]{found['rest'] or ''}"


def _name_of(stage: Any) -> str:
    """Return the name of a stage as the file says it; empty where the file says no stage."""
    if not isinstance(stage, DictConfig):
        return ""
    return str(stage.get("name") or stage.get("kind")).rpartition(":")[2]


def newer_spelling(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return the stages of a recipe that says its warm-up in `sft`, as the file should say them; None for others."""
    warm_up = raw.get("sft")
    if not isinstance(warm_up, dict) or not warm_up.get("phases"):
        return None
    return {"stages": [{"kind": "sft", **warm_up}, {"kind": "rl"}]}
