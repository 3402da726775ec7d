"""A worker looks for weights in the model's files where the learner publishes what these hold."""

from pathlib import Path

import pytest

from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.worker import _model_here

ADAPTER = "model.adapter={rank: 4, alpha: 8}"


@pytest.mark.parametrize(
    ("overrides", "looks"),
    [
        ([], True),
        ([ADAPTER], True),
        ([ADAPTER, "model.adapter.quantize_base=nf4"], False),
        (["weights.pull_files=false"], False),
    ],
)
def test_a_worker_looks_at_files_that_hold_what_is_published(
    overrides: list[str], looks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    found = _model_here(load_recipe("arithmetic.yaml", ["model.path=model", "model.random=null", *overrides]))
    assert found == (tmp_path / "model" if looks else None)


@pytest.mark.parametrize("path", ["elsewhere", "Qwen/Qwen3-8B"])
def test_a_directory_that_is_not_here_is_not_looked_for(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _model_here(load_recipe("arithmetic.yaml", [f"model.path={path}", "model.random=null"])) is None
