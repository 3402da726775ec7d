"""An implementation states its abilities: only the file that registers it compares its name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.broker.errors import ConfigError
from headway.deploy.recipe.resolve import load_recipe
from headway.learner.backends import BACKENDS, BackendAbilities
from headway.rollout_workers.engines import ENGINES
from headway.weightsync.transports.base import TRANSPORTS

ROOT = Path(__file__).parents[1]
ROOMS = ("algorithms", "broker", "weightsync", "rollout_workers", "learner", "deploy")
NAMES = {*ENGINES, *TRANSPORTS, *BACKENDS}


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every comparison, membership or `case` that spells a registered name."""
    for node in ast.walk(tree):
        asked = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        asked += [node.value] if isinstance(node, ast.MatchValue) else []
        inner = [one for part in asked for one in ast.walk(part)]
        if any(isinstance(one, ast.Attribute) and one.attr == "url" for one in inner):
            continue  # the broker's url may be `embedded`
        for one in inner:
            if isinstance(one, ast.Constant) and one.value in NAMES:
                yield one.lineno, str(one.value)


def test_code_compares_no_name_of_an_engine_a_transport_or_a_backend() -> None:
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    assert len(files) > 100
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in files
        for line, name in compared(ast.parse(file.read_text()))
    ]
    assert found == []


def test_a_backend_states_how_it_splits_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    split = ["learner.processes=2", "learner.layout.tensor=2"]
    load_recipe("arithmetic.yaml", ["learner.backend=my:Backend", *split])
    own = BACKENDS["megatron"]
    stated = BackendAbilities(splits=("context", "pipeline"))
    monkeypatch.setitem(BACKENDS, "megatron", type(own)(**{**vars(own), "abilities": stated}))
    with pytest.raises(ConfigError, match=r"layout\.tensor is 2, and .*=megatron splits by context, pipeline alone"):
        load_recipe("arithmetic.yaml", ["learner.backend=megatron", *split])
