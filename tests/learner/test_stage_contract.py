"""Every stage promises the same, whatever it trains: it leaves a model, and goes on where it was stopped or killed."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import tests.learner.stage_rank as stage_rank
from headway.broker.errors import ConfigError
from headway.learner.backends import open_backend
from headway.learner.backends.score_head import has_score_head
from headway.learner.checkpoint import FILES_FILE, STATE_FILE, LearnerState, seal
from headway.learner.config import ModelConfig
from headway.learner.ranks import Ranks
from headway.learner.stages.base import StageMetrics
from headway.learner.stages.loop import saved_tensors, weights_digest
from headway.learner.stages.stage_checkpoints import StageCheckpoints
from tests.learner.stage_cases import MODEL, OPEN, STEPS, Left, Open, Watcher, open_reward_model
from tests.learner.tiny import OPTIMIZER
from tests.learner.torchrun import run_ranks

KINDS = [name for name in OPEN if not name.startswith("rl ")]
STAGES = pytest.mark.parametrize("open_one", [OPEN[name] for name in KINDS], ids=KINDS)
BESIDE = {"rl online_dpo", "rl ppo"}
"""The stages with another model that changes beside the policy."""


@STAGES
def test_it_leaves_a_model_that_the_next_stage_loads(open_one: Open, tmp_path: Path) -> None:
    stage, backend = open_one(tmp_path, Watcher())
    before = weights_digest(backend.named_tensors())
    assert stage.run()
    trained = dict(backend.named_tensors())
    directory = stage.save()
    is_reward_model = has_score_head(ModelConfig(path=str(directory)))
    assert is_reward_model == (open_one is open_reward_model)
    kind = AutoModelForSequenceClassification if is_reward_model else AutoModelForCausalLM
    left = kind.from_pretrained(directory).state_dict()
    assert all(torch.equal(left[name], tensor) for name, tensor in trained.items())
    assert weights_digest(trained.items()) != before


@STAGES
def test_its_metrics_are_typed(open_one: Open, tmp_path: Path) -> None:
    watcher = Watcher()
    stage, _ = open_one(tmp_path, watcher)
    assert stage.run()
    told = stage.metrics
    assert msgspec.json.decode(msgspec.json.encode(told), type=type(told), strict=True) == told
    assert (isinstance(told, StageMetrics), told.steps, told.loss) == (True, STEPS, watcher.losses[-1])


@STAGES
def test_opened_again_at_its_end_it_trains_nothing(open_one: Open, tmp_path: Path) -> None:
    stage, _ = open_one(tmp_path, Watcher())
    assert stage.run()
    left = weights_digest(saved_tensors(stage.save()))
    watcher = Watcher()
    again, backend = open_one(tmp_path, watcher)
    assert again.run()
    assert (again.metrics.steps, watcher.losses) == (STEPS, [])
    assert weights_digest(backend.named_tensors()) == left == weights_digest(saved_tensors(again.save()))


@pytest.fixture(scope="module")
def of_megatron(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Left]]:
    """Return the results of every stage on Megatron Core, which patches its process."""
    directory = tmp_path_factory.mktemp("megatron")
    run_ranks(stage_rank.__name__, 1, directory, "megatron")
    return msgspec.json.decode((directory / "left.json").read_bytes(), type=dict[str, dict[str, Left]])


@pytest.mark.parametrize("backend_kind", ["fsdp", pytest.param("megatron", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPEN)
def test_it_goes_on_where_it_was(name: str, backend_kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Losses, weights, moments and generators agree bit for bit, and so does a critic or a reference that learns."""
    is_megatron = backend_kind == "megatron"
    runs = request.getfixturevalue("of_megatron")[name] if is_megatron else stage_rank.runs(name, tmp_path, "fsdp")
    expected: Left = runs.pop("undisturbed")
    assert len(expected.losses) == STEPS
    for disturbed in runs.values():
        assert 0 < len(disturbed.losses) < STEPS
        assert disturbed.losses == expected.losses[-len(disturbed.losses) :]
        assert msgspec.structs.replace(disturbed, losses=expected.losses) == expected
    assert [name for name in expected.files if "reference" in name or "critic" in name] or name not in BESIDE


def test_checkpoints_of_other_settings_are_refused_by_name_and_stay(tmp_path: Path) -> None:
    backend = open_backend("fsdp", MODEL, OPTIMIZER, seed=3)

    def opened(**binding: Any) -> StageCheckpoints:
        return StageCheckpoints(backend, Ranks.of(backend), tmp_path / "sft", binding, every_s=60.0)

    opened(model={"path": "a"}, epochs=1).keep(5, {"steps": 5})
    assert opened(epochs=1, model={"path": "a"}).load() == {"steps": 5}
    with pytest.raises(
        ConfigError, match=r"5 trained steps.*epochs was 1 and is 2 now, model\.path was \"a\" and is \"b\""
    ):
        opened(model={"path": "b"}, epochs=2).load()
    assert opened(model={"path": "a"}, epochs=1).load() == {"steps": 5}
    opened(model={"path": "a"}, epochs=1).leave(6, {"steps": 6})
    with pytest.raises(ConfigError, match=r"sft has 6 trained steps.*remove .*/sft\."):
        opened(model={"path": "a"}, epochs=2).load()


@pytest.mark.parametrize("damage", ["a binding of an older version", "no whole checkpoint"])
def test_checkpoints_that_cannot_be_gone_on_with_are_not_removed(damage: str, tmp_path: Path) -> None:
    backend = open_backend("fsdp", MODEL, OPTIMIZER, seed=3)
    checkpoints = StageCheckpoints(backend, Ranks.of(backend), tmp_path / "sft", {"epochs": 1}, every_s=60.0)
    checkpoints.keep(5, {"steps": 5})
    (written,) = checkpoints.running_directory.glob("*/step_5")
    if damage == "no whole checkpoint":
        (written / STATE_FILE).unlink()
    else:
        (written / FILES_FILE).unlink()
        seal(written, LearnerState(identity="7777777777777777", incarnation=0, step=5))
    with pytest.raises(ConfigError, match="older version" if "older" in damage else "whole"):
        checkpoints.load()
    assert (written / "model.safetensors").exists()
