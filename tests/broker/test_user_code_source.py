"""A misspelt import path is told from the module's source, of which nothing runs."""

import re
from pathlib import Path

import pytest

from headway.broker.errors import ConfigError
from headway.broker.user_code.import_paths import definition
from headway.rollout_workers.config import RewardConfig
from headway.rollout_workers.rewards.functions import check_function

MODULE = """
import os.path as paths
from math import sqrt
raise SystemExit("this module was run")
async def later(completions): ...
class Judge: ...
if paths:
    chosen = sqrt
def verl(data_source, solution_str, ground_truth, extra_info=None, *, factor=1.0): ...
def trl(*, completions, **columns): ...
def neither(response, answer): ...
def by_answer(response, /, *answers, key=lambda completions: completions): ...
def picky(solution_str, *, key=lambda completions: completions): ...
"""
GLOBAL = """
def init(scale):
    global made, later
    def made(completions): return [scale]
def later(response): ...
init(1.0)
model.eval()
"""
DYNAMIC = {
    "globals": "globals()['made'] = len",
    "star": "from os.path import *",
    "locals": "locals()['made'] = len",
    "update": "locals().update(made=len)",
    "dict": "import seen_dict; seen_dict.__dict__['made'] = len",
    "frame": "import sys; sys._getframe().f_globals['made'] = len",
    "eval": "eval('[made := len]')",
    "alias": "from sys import modules as loaded; loaded[__name__].made = len",
    "wrapped": "def made(response): ...\nfor name in ['made']: globals()[name] = len",
}
"""Modules whose source does not show what the name `made` is."""


@pytest.fixture(autouse=True)
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_IMPORT_PATH", str(tmp_path))
    (tmp_path / "seen_rewards.py").write_text(MODULE)
    (tmp_path / "seen_broken.py").write_text("def x(:\n")
    (tmp_path / "seen_global.py").write_text(GLOBAL)
    for name, source in DYNAMIC.items():
        (tmp_path / f"seen_{name}.py").write_text(f"{source}\n")
    (tmp_path / "seen_package" / "inner").mkdir(parents=True)
    (tmp_path / "seen_package" / "inner" / "rewards.py").write_text(MODULE)


@pytest.mark.parametrize("name", ["later", "Judge", "verl", "trl"])
@pytest.mark.parametrize("module", ["seen_rewards", "seen_package.inner.rewards"])
def test_a_definition_is_found(module: str, name: str) -> None:
    found = definition(f"{module}:{name}", "key")
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "path",
    [
        "seen_rewards:chosen",
        "seen_rewards:sqrt",
        "seen_rewards:paths",
        *(f"seen_{name}:made" for name in DYNAMIC),
        "seen_global:made",
        "seen_global:later",
        "seen_package.unseen:x",
        "headway.broker.errors:NoSuchName",
    ],
)
def test_what_only_an_import_can_tell_is_left_to_it(path: str) -> None:
    assert definition(path, "key") is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("seen_reward:verl", r"^key: cannot import 'seen_reward' .*did you mean 'seen_rewards:verl'\?"),
        ("unheard_of:verl", "^key: cannot import 'unheard_of' for 'unheard_of:verl': No module named"),
        ("seen_rewards.py:verl", "'seen_rewards' is not a package .write 'seen_rewards:verl', without .py"),
        ("seen_rewards:verll", r"has no 'verll' .*did you mean seen_rewards:verl\?"),
        ("seen_global:mad", r"has no 'mad' .*did you mean seen_global:made\?"),
        ("seen_broken:x", "importing 'seen_broken' raised SyntaxError: .*line 1"),
        ("./seen_rewards.py:verl", "is no import path; write package.module:name"),
    ],
)
def test_what_an_import_would_refuse_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        definition(path, "key")


@pytest.mark.parametrize("name", ["verl", "trl", "later", "Judge", "picky"])
def test_a_reward_of_either_signature_is_accepted(name: str) -> None:
    check_function(RewardConfig(kind=f"seen_rewards:{name}"), "rewards[0].kind")


@pytest.mark.parametrize("call", ["neither(response, answer)", "by_answer(response, answers, key)"])
def test_a_reward_of_neither_signature_is_refused_unless_the_recipe_names_one(call: str) -> None:
    kind = f"seen_rewards:{call.partition('(')[0]}"
    with pytest.raises(ConfigError, match=rf"{re.escape(f'seen_rewards:{call}')} has neither of the signatures"):
        check_function(RewardConfig(kind=kind), "rewards[0].kind")
    check_function(RewardConfig(kind=kind, signature="verl"), "rewards[0].kind")
