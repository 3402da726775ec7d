# mypy: disable-error-code="redundant-cast"
"""What every stage promises, whatever it trains: it leaves a model, and goes on where it was stopped or killed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol, cast

import msgspec
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from broker.client.batches import TakenBatch
from broker.schema import WeightVersion
from learner.backends import open_backend
from learner.backends.base import Backend
from learner.backends.score_head import has_score_head
from learner.checkpoints.checkpoint import CheckpointStore
from learner.checkpoints.weights_digest import saved_tensors, weights_digest
from learner.config import AlgorithmConfig, LearnerConfig, ModelConfig, RecordsConfig, SftPhaseConfig, StageConfig
from learner.data.prompts.cursor import PromptCursor
from learner.data.prompts.rendering import Renderer
from learner.experience.stream import Experience
from learner.models.model import load_tokenizer
from learner.objective.objective import Objective
from learner.objective.update import Updater
from learner.ranks import Ranks
from learner.stages import open_stage
from learner.stages.base import Progress, Stage, StageMetrics, StageParts
from learner.stages.loop import Learner, LoopConfig, TrainedStep
from learner.stages.resuming import choose_origin
from learner.stages.rl import RlStage
from learner.stages.stage_checkpoints import StageCheckpoints
from learner.stages.supervised.options import PreferenceOptions
from tests.learner import distilling
from tests.learner.batches import batch
from tests.learner.preferences import opened, opened_scores
from tests.learner.tiny import OPTIMIZER, model_config

STEPS = 6
MODEL = model_config("qwen3")


class Killed(BaseException):
    """The process is gone: nothing of the stage may see it coming."""


@dataclass
class Watcher:
    """Counts the steps that one opening of a stage trained, and ends it after so many."""

    kill_at: int = 99
    stop_at: int = 99
    losses: list[float] = field(default_factory=list)

    def saw(self, loss: float) -> None:
        self.losses.append(loss)
        if len(self.losses) == self.kill_at:
            raise Killed

    def should_stop(self) -> bool:
        return len(self.losses) >= self.stop_at


class Open(Protocol):
    """Open the stage as a new process would: fresh weights, and nothing known but what lies in `directory`."""

    def __call__(self, directory: Path, watcher: Watcher) -> tuple[Stage, Backend]: ...


def open_sft(directory: Path, watcher: Watcher) -> tuple[Stage, Backend]:
    phase = SftPhaseConfig(kind="arithmetic", batch_size=3, max_steps=STEPS // 2, learning_rate=1e-2)
    backend = fresh()
    ranks, tokenizer = Ranks.of(backend), load_tokenizer(MODEL)
    parts = StageParts(
        backend=backend,
        ranks=ranks,
        tokenizer=tokenizer,
        renderer=Renderer(tokenizer),
        checkpoints=StageCheckpoints(backend, ranks, directory / "sft", "this recipe", every_s=0.0),
        seed=1,
        micro_batch_tokens=64,
        gate=lambda tensors, prompts: 0.0,
        open_model=lambda model: open_backend("fsdp", model, OPTIMIZER),
        report=lambda progress: watcher.saw(cast(Progress, progress).loss),
        should_stop=watcher.should_stop,
    )
    return open_stage(StageConfig(kind="sft", phases=(phase, phase)), parts, "stages[0]"), backend


def open_rl(directory: Path, watcher: Watcher) -> tuple[Stage, Backend]:
    """With the batches that a broker would give, and nobody to publish to."""
    backend = fresh()
    ranks, updater = Ranks.of(backend), updater_of(backend)
    checkpoints = CheckpointStore(directory / "checkpoints", keep=2)
    origin = choose_origin(checkpoints, updater_and_model(backend, updater), ranks, resume=True, rewind=None)

    def on_step(step: TrainedStep) -> None:
        watcher.saw(step.update.loss)

    learner = Learner(
        backend=backend,
        ranks=ranks,
        updater=updater,
        experience=cast(Experience, Batches()),
        cursor=cast(PromptCursor, SimpleNamespace(state=dict, mark_trained=list)),
        checkpoints=checkpoints,
        config=LoopConfig(
            steps=STEPS, checkpoint_every=2, probe_tokens=(1, 2), probe_tolerance=1.0, asynchronous=False
        ),
        observer=SimpleNamespace(on_weights=lambda *_, **__: None, on_publish=lambda _: None, on_step=on_step),
        should_stop=watcher.should_stop,
        version=WeightVersion(1, origin.step),
    )
    return RlStage(learner), backend


class Batches:
    """Of every step the same, however often it is asked for."""

    def take(self, step: int, *_: object, **__: object) -> TakenBatch:
        return TakenBatch(step, tuple(batch(step)))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def fresh() -> Backend:
    return open_backend("fsdp", MODEL, OPTIMIZER, seed=3)


def updater_of(backend: Backend) -> Updater:
    algorithm = AlgorithmConfig()
    return Updater(
        backend,
        Ranks.of(backend),
        Objective(algorithm, is_one_update=True),
        None,
        algorithm=algorithm,
        learner=LearnerConfig(micro_batch_tokens=64),
        optimizer=msgspec.structs.replace(OPTIMIZER, learning_rate=1e-2),
        temperature=1.0,
        max_new_tokens=32,
        max_lag=2,
    )


def updater_and_model(backend: Backend, updater: Updater) -> Callable[[Path], None]:
    def load(path: Path) -> None:
        backend.load(path)
        updater.load(path)

    return load


def open_dpo(directory: Path, watcher: Watcher) -> tuple[Stage, Backend]:
    options = PreferenceOptions(
        data=RecordsConfig(), batch_size=3, max_steps=STEPS, epochs=STEPS, learning_rate=1e-2, evaluate_every_steps=4
    )
    return opened(
        directory,
        options,
        every_s=0.0,
        report=lambda progress: watcher.saw(progress.loss),
        should_stop=watcher.should_stop,
    )


def open_reward_model(directory: Path, watcher: Watcher) -> tuple[Stage, Backend]:
    return opened_scores(
        directory,
        options={"max_steps": STEPS, "epochs": STEPS, "evaluate_every_steps": 4},
        every_s=0.0,
        report=lambda progress: watcher.saw(progress.loss),
        should_stop=watcher.should_stop,
    )


def open_distill(directory: Path, watcher: Watcher) -> tuple[Stage, Backend]:
    options = replace(distilling.OPTIONS, max_steps=STEPS, epochs=STEPS, evaluate_every_steps=4)
    return distilling.opened(
        directory,
        options,
        every_s=0.0,
        report=lambda progress: watcher.saw(progress.loss),
        should_stop=watcher.should_stop,
    )


STAGES = pytest.mark.parametrize(
    "open_one",
    [open_sft, open_dpo, open_reward_model, open_distill, open_rl],
    ids=["sft", "dpo", "reward_model", "distill", "rl"],
)


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


@STAGES
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_it_goes_on_where_it_was(how: str, open_one: Open, tmp_path: Path) -> None:
    undisturbed, backend = open_one(tmp_path / "undisturbed", Watcher())
    assert undisturbed.run()
    expected = weights_digest(backend.named_tensors())

    first, rest = Watcher(kill_at=4) if how == "killed" else Watcher(stop_at=4), Watcher()
    stage, _ = open_one(tmp_path / "disturbed", first)
    if how == "killed":
        with pytest.raises(Killed):
            stage.run()
    else:
        assert not stage.run()
    again, backend = open_one(tmp_path / "disturbed", rest)
    assert again.run()
    assert weights_digest(backend.named_tensors()) == expected
    assert len(rest.losses) < STEPS
    assert again.metrics == undisturbed.metrics


def test_checkpoints_of_other_settings_are_not_gone_on_with(tmp_path: Path) -> None:
    backend = fresh()
    StageCheckpoints(backend, Ranks.of(backend), tmp_path / "sft", "before").keep(5, {"steps": 5})
    assert StageCheckpoints(backend, Ranks.of(backend), tmp_path / "sft", "before").load() == {"steps": 5}
    changed = StageCheckpoints(backend, Ranks.of(backend), tmp_path / "sft", "now")
    assert changed.load() == {}
    changed.keep(1, {"steps": 1})
    assert changed.load() == {"steps": 1}
