"""Stages in a recipe: their keys, the order in which they run, and the weights from which each starts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from msgspec.structs import replace as replace_struct

from headway.broker.errors import ConfigError, HeadwayError
from headway.deploy.launch.commands import stage_command
from headway.deploy.launch.local_run import LocalRun, stop_notice
from headway.deploy.recipe.parse import shipped_recipes
from headway.deploy.recipe.preflight import check_data
from headway.deploy.recipe.recipe import Recipe
from headway.deploy.recipe.resolve import dump_recipe, load_recipe, with_overrides
from headway.deploy.recipe.stage_graph import chain_of, impossible_starts, number_of, start_of
from headway.deploy.roles.workerless_stage import ProgressBars, fine_tune
from headway.deploy.run.record import read_record
from headway.deploy.run.resumable_keys import check_resumable, stage_binding
from headway.deploy.run.run_directory import SETTINGS, prepare
from headway.deploy.run.stage_output import (
    StageRecord,
    after_stages,
    check_made,
    is_of,
    mark_complete,
    origin,
    planned,
    record_of,
    starting_at,
    tracker_identity,
)
from headway.deploy.terminal import Terminal
from headway.learner.config import ModelConfig, RecordsConfig, StageConfig
from headway.learner.data.prompts.base import Message
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.data.records.loading import open_pairs
from headway.learner.models.pretrained import load_model, load_tokenizer
from headway.learner.stages.base import Progress
from headway.learner.stages.registry import RECORD_STAGES
from tests.deploy.runs import stage_event
from tests.end_to_end.recipes import TINY

from .sinks.curves import curve
from .test_cli import headway

PHASE = {"kind": "arithmetic", "batch_size": 4, "max_steps": 2, "learning_rate": 1e-2}
SFT = {"kind": "sft", "phases": [PHASE]}
RL = {"kind": "rl"}
OWN = {"kind": "own_stages:Repeat", "options": {"text": "1+1=2#2"}}

OWN_STAGE = '''
"""A user's own stage: a few steps on one example."""

import msgspec

from headway.learner.data.examples import Example
from headway.learner.objective.loss import supervised_loss
from headway.learner.batching.packing import pack
from headway.learner.stages.base import Progress, StageMetrics
from headway.learner.stages.sft import tokenize


class Repeat:
    class Options(msgspec.Struct, kw_only=True):
        text: str
        steps: int = 2

    def __init__(self, parts, options):
        self.parts, self.options = parts, options
        self.step, self.loss = parts.checkpoints.load().get("step", 0), None

    @property
    def metrics(self):
        return StageMetrics(steps=self.step, loss=self.loss)

    def run(self):
        parts = self.parts
        example = Example(query="^1+1=", response=self.options.text)
        while self.step < self.options.steps:
            rows = [tokenize(example, parts.tokenizer, parts.renderer)]
            batches = pack(rows, parts.ranks.replica, parts.ranks.replicas, parts.micro_batch_tokens)
            loss = supervised_loss(batches, parts.ranks.sum)
            self.loss, _, _ = parts.backend.step(batches, loss, temperature=1.0, learning_rate=1e-2)
            self.step += 1
            parts.report(Progress(part="repeat", step=self.step, max_steps=self.options.steps, loss=self.loss))
        return True

    def save(self):
        return self.parts.checkpoints.leave(self.step, {"step": self.step})
'''


def load(tmp_path: Path, **sections: Any) -> Recipe:
    path = tmp_path / "recipe.yaml"
    run = {"name": "mine", "directory": str(tmp_path / "runs")}
    path.write_text(json.dumps({**TINY, "rewards": [{"kind": "arithmetic"}], "run": run, **sections}))
    return load_recipe(path)


def test_the_sft_section_of_before_is_the_first_stage(tmp_path: Path) -> None:
    old, new = load(tmp_path, sft={"phases": [PHASE]}), load(tmp_path, stages=[SFT, RL])
    assert old.plan == new.plan
    assert [one.directory for one in planned(old)] == [old.run_directory / "sft"]
    assert planned(load(tmp_path)) == []
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_recipe(new))
    assert load_recipe(path) == new


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"stages": [{"kind": "slf"}, RL]}, r"stages\[0\]\.kind: there is no 'slf'; did you mean 'sft'\?"),
        ({"stages": [{"kind": "rl", "options": {"steps": 3}}]}, r"stages\[0\]\.steps: kind=rl has no such option"),
        ({"stages": [{"kind": "sft", "options": {"phase": 3}}]}, r"stages\[0\]\.options\.phase: no such option"),
        ({"stages": [{"kind": "sft", "phases": [{**PHASE, "max_stepz": 3}]}]}, r"stages\[0\]\.phases\[0\]\.max_stepz"),
        ({"stages": [{"kind": "sft", "phases": [{**PHASE, "batch_size": 1 << 20}]}]}, r"batch_size is 1\.04858e\+06"),
        ({"stages": [{"kind": "dpo"}]}, r"stages\[0\]\.options: .* required field `data`"),
        ({"stages": [{**SFT, "options": {"data": {}}}]}, r"stages\[0\] has phases and options"),
        ({"stages": [{"kind": "a:B", "phases": [PHASE]}]}, r"stages\[0\]\.phases are of kind=sft"),
        ({"stages": [RL, SFT]}, r"stages\[0\] is rl, which ends the run, and stages\[1\] follows it"),
        ({"stages": [{"kind": "sft"}]}, "no stage is left to run"),
        ({"stages": [SFT, RL], "sft": {"phases": [PHASE]}}, "both sft.phases and stages"),
        ({"stages": [{**SFT, "name": "a.b"}]}, r"stages\[0\]\.name is 'a\.b'; expected letters"),
        ({"stages": [{**SFT, "name": "model"}]}, r"stages\[0\]\.name is 'model'"),
        ({"stages": [{**SFT, "name": "rl"}, RL]}, r"stages\[0\]\.name is 'rl', and so is another stage's"),
        ({"stages": [SFT, {**RL, "starts_from": "stf"}]}, r"stages\[1\]\.starts_from: 'stf': .* sft \(0\), rl \(1\)"),
        ({"stages": [{**SFT, "starts_from": "rl"}, RL]}, r"'rl' does not come before; .* numbers, are none"),
        (
            {"stages": [SFT, {**OWN, "options": {"of": {"path": "stage:x"}}}]},
            r"stages\[1\]\.options\.of\.path: 'x': no",
        ),
        (
            {"stages": [{**OWN, "options": {"teacher": "stage:Repeat"}}]},
            r"options\.teacher: stage 'Repeat' does not come",
        ),
        ({"stages": [SFT, SFT, {**OWN, "options": {"teacher": "stage:sft"}}]}, "'sft': several stages have this name"),
        ({"model": {"path": "stage:rl"}, "stages": [SFT, RL]}, r"^recipe\.yaml: model\.path: stage 'rl' does not come"),
    ],
)
def test_a_wrong_stage_is_named(sections: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        load(tmp_path, **sections)


def test_a_warm_up_in_its_older_spelling_is_told_the_newer_one(tmp_path: Path) -> None:
    old = load(tmp_path, sft={"phases": [PHASE]})
    answer = headway("run", "recipe.yaml", "--dry-run", cwd=tmp_path)
    said = answer.stderr.partition("Write the same as:")[2]
    assert answer.returncode == 0
    assert answer.stderr.startswith("recipe.yaml: `sft` is an older spelling of the first stage.")
    assert load(tmp_path, **yaml.safe_load(said)).plan == old.plan
    assert headway("run", "recipe.yaml", "--dry-run", cwd=tmp_path).stderr == ""


def test_a_stage_is_told_by_its_name(tmp_path: Path) -> None:
    recipe = load(tmp_path, stages=[SFT, {"kind": "my_stages:Distill"}, RL])
    names = [stage_command(recipe, recipe.run_directory, one).name for one in planned(recipe)]
    assert names == ["Stage sft", "Stage Distill"]
    assert stop_notice(recipe.plan[1]) == "stage Distill goes on from here next time"


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_recipes())
def test_no_recipe_that_ships_is_in_the_older_spelling(name: str) -> None:
    hints = list[str]()
    load_recipe(name, hint=hints.append)
    assert hints == []


@pytest.mark.parametrize("name", ["dpo.yaml", "sft-rm-ppo.yaml"])
def test_recipes_measure_pairs_of_prompts_that_they_do_not_train(name: str) -> None:
    recipe = load_recipe(name)
    (options,) = (stage.options for stage in recipe.plan if "data" in stage.options)
    trained, held_out = (
        {pair.prompt for pair in open_pairs(msgspec.convert(options[key], RecordsConfig), recipe.run.seed, key)}
        for key in ("data", "held_out")
    )
    assert held_out
    assert not held_out & trained


@pytest.mark.parametrize("key", ["sft", "stages.sft", "stages[0]"])
def test_overrides_name_a_stage(key: str) -> None:
    recipe = load_recipe("arithmetic.yaml", [f"{key}.phases[0].max_steps=3", f"{key}.phases.1.max_steps=4"])
    assert [phase.max_steps for phase in recipe.warm_up] == [3, 4]
    assert not load_recipe("arithmetic.yaml", [f"{key}.phases=[]"]).warm_up
    changed = with_overrides(recipe, [f"{key}={{kind: sft, phases: [{{kind: arithmetic}}]}}"])
    assert [len(changed.warm_up), changed.plan[0].kind] == [1, "sft"]


def test_an_override_of_a_stage_that_there_is_not_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'stages\.stf\.phases': no stage has this name; the stages are sft, rl\."):
        load_recipe("arithmetic.yaml", ["stages.stf.phases=[]"])
    own = {"kind": "my_stages:Distill", "options": {"rate": 0.5}}
    load(tmp_path, stages=[own, SFT, SFT, RL])
    path = tmp_path / "recipe.yaml"
    assert load_recipe(path, ["stages.Distill.options.rate=1"]).stages[0].options == {"rate": 1}
    with pytest.raises(ConfigError, match=r"2 stages have this name; the stages are Distill, sft, sft, rl"):
        load_recipe(path, ["sft.phases=[]"])


@pytest.mark.parametrize("has_stages", [False, True])
def test_a_run_of_before_resumes_in_either_form(has_stages: bool, tmp_path: Path) -> None:
    before = load(tmp_path, sft={"phases": [PHASE]})
    directory = prepare(before, resume=False, overwrite=False)
    settings = msgspec.json.decode((directory / SETTINGS).read_bytes())
    del settings["stages"]  # older recipes have none
    if has_stages:
        settings["sft"], settings["stages"] = {}, [SFT, {"kind": "rl", "phases": [], "options": {}}]  # they lack names
    (directory / SETTINGS).write_bytes(msgspec.json.encode(settings))
    check_resumable(load(tmp_path, stages=[SFT, RL]), None)
    check_resumable(before, None)
    others: list[dict[str, Any]] = [{"stages": [SFT, SFT, RL]}, {"stages": [RL]}, {"sft": {"phases": []}}]
    for other in others:
        with pytest.raises(ConfigError, match=r"the stages before the learner are over|the warm-up is over"):
            check_resumable(load(tmp_path, **other), None)


def test_a_stage_starts_from_the_nearest_policy_or_the_one_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORD_STAGES, "dpo", replace(RECORD_STAGES["dpo"], leaves_policy=False))
    sft, scorer, rl = (StageConfig(kind=kind) for kind in ("sft", "dpo", "rl"))
    assert [start_of((sft, scorer, rl), number) for number in range(3)] == [None, 0, 0]
    named = (
        sft,
        StageConfig(kind="sft", name="second", starts_from="model"),
        StageConfig(kind="kto", starts_from="sft"),
    )
    assert [chain_of(named, number) for number in range(3)] == [[0], [1], [0, 2]]
    told = list(impossible_starts((sft, scorer, replace_struct(rl, starts_from="dpo"))))
    assert len(told) == 1
    assert "which leaves a scorer" in told[0]


@pytest.mark.parametrize(("stage", "number"), [("warm-up", 0), ("dpo", 1), ("2", 2), ("own-kind", 2), ("rl", 3)])
def test_a_stage_is_named_by_name_kind_or_number(stage: str, number: int) -> None:
    kinds = (("sft", "warm-up"), ("dpo", ""), ("own_kind", "a"), ("rl", ""))
    assert number_of([StageConfig(kind=kind, name=name) for kind, name in kinds], stage) == number


def test_the_help_of_train_lists_the_kinds(tmp_path: Path) -> None:
    shown = headway("train", "--help", cwd=tmp_path).stdout
    assert f"Kinds: {', '.join(RECORD_STAGES).replace('_', '-')}, and your own." in " ".join(shown.split())


def test_the_model_of_a_named_stage_is_a_directory_once_it_is_there(tmp_path: Path) -> None:
    own = {**OWN, "name": "student", "starts_from": "model", "options": {"teacher": "stage:first", "text": "stage"}}
    recipe = load(tmp_path, stages=[{**SFT, "name": "first"}, own, {**RL, "starts_from": "first"}])
    sft, student = planned(recipe)
    assert [sft.directory.name, student.directory.name] == ["sft", "2-student"]
    with pytest.raises(ConfigError, match=r"Stage student needs what stage first leaves, .* headway train 0 REC"):
        check_made(recipe, [1])
    with pytest.raises(ConfigError, match="Stage rl needs what stage first leaves"):
        check_made(recipe, [2])
    check_made(recipe, range(3))
    sft.directory.mkdir(parents=True)
    (sft.directory / "sft.json").touch()
    check_made(recipe, [1])
    at_student, at_rl = starting_at(recipe, 1), starting_at(recipe, 2)
    assert at_student.stages[1].options == {"teacher": str(sft.directory.resolve()), "text": "stage"}
    assert (at_student.model, at_rl.model.path) == (recipe.model, str(sft.directory))


def test_neither_a_name_nor_a_stage_beside_the_chain_makes_a_model_another_one(tmp_path: Path) -> None:
    old = load(tmp_path, stages=[SFT, OWN])
    made = origin(old, 1)
    assert [sorted(stage) for stage in made["stages"]] == [["kind", "options", "phases"]] * 2  # the form of old
    renamed = load(tmp_path, stages=[{**SFT, "name": "a"}, {**OWN, "name": "b", "starts_from": "a"}])
    beside = load(tmp_path, stages=[SFT, {**SFT, "name": "c"}, {**OWN, "starts_from": "sft"}])
    assert made == origin(renamed, 1) == origin(beside, 2) != origin(load(tmp_path, stages=[OWN]), 0)
    named = [{**OWN, "name": "c", "options": {"text": text}} for text in ("1", "2")]
    students = ([SFT, one, {**OWN, "options": {"teacher": "stage:c"}, "starts_from": "sft"}] for one in named)
    first, second = (origin(load(tmp_path, stages=stages), 2) for stages in students)
    assert first != second


IMITATION = {"kind": "sft", "options": {"data": {"kind": "arithmetic", "options": {"records": 40}}, "batch_size": 8}}
MAY_CHANGE = (
    "optimizer.learning_rate=1e-5",
    "optimizer.weight_decay=0.5",
    "optimizer.schedule=cosine",
    "learner.processes=2",
    "learner.processes=2 learner.layout.context=2",
    "learner.micro_batch_tokens=99",
    "learner.threads=2",
    "model.dtype=bfloat16",
    "prompts.epochs=7",
    "prompts.deadline_s=7",
    "checkpoint.stage_every_s=1",
    "evaluation.prompts=3",
)
BINDS = (
    "run.seed=3",
    "model.random.config.hidden_size=16",
    "prompts.system_prompt=Hi",
    "stages[0].options.batch_size=4",
    "stages[0].options.data.options.records=41",
    "learner.backend=megatron",
    "prompts.options.max_operations=7",
)


@pytest.mark.parametrize("override", [*MAY_CHANGE, *BINDS])
def test_a_stage_is_bound_by_what_it_trains(override: str, tmp_path: Path) -> None:
    """By nothing that a resumed run may change; a stage that another one names binds in the same way."""
    taught = {**OWN, "options": {"text": "1+1=2#2", "teacher": "stage:sft"}, "starts_from": "model"}
    recipe = load(tmp_path, stages=[IMITATION, taught])
    changed = with_overrides(recipe, override.split())
    for number in (0, 1):
        assert (stage_binding(changed, number) == stage_binding(recipe, number)) == (override in MAY_CHANGE)


def test_a_stage_that_was_killed_goes_on_with_another_optimizer_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load(tmp_path, stages=[IMITATION], checkpoint={"stage_every_s": 0})
    (stage,) = planned(recipe)
    seen: list[int] = []

    class Killed(BaseException):
        pass

    def killed(self: Any, progress: Progress) -> None:
        seen.append(progress.step)
        if len(seen) == 3:
            raise Killed

    monkeypatch.setattr(ProgressBars, "show", killed)
    with pytest.raises(Killed):
        fine_tune(recipe, stage.directory, console=Terminal())
    with pytest.raises(ConfigError, match=r"2 trained steps of this stage.*batch_size was 8 and is 4 now"):
        fine_tune(with_overrides(recipe, ["stages[0].options.batch_size=4"]), stage.directory, console=Terminal())
    fine_tune(with_overrides(recipe, ["optimizer.weight_decay=0.5"]), stage.directory, console=Terminal())
    assert seen == [1, 2, 3, 3, 4, 5]


def test_a_stage_computes_with_the_learners_threads_beside_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_threads: None
) -> None:
    """However it was started. The process also holds the engine that measures its pass rate, which would take others'
    number for all of the process's threads."""
    recipe = load(
        tmp_path,
        stages=[SFT],
        learner={**TINY["learner"], "threads": 3},
        engine={**TINY["engine"], "threads": 2},
        evaluation={"prompts": 2},
    )
    seen: list[int] = []
    monkeypatch.setattr(ProgressBars, "show", lambda self, progress: seen.append(torch.get_num_threads()))
    assert fine_tune(recipe, planned(recipe)[0].directory, console=Terminal()).pass_rate is not None
    assert seen == [3, 3]


@pytest.mark.slow
def test_each_stage_starts_from_what_the_one_before_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_stages.py").write_text(OWN_STAGE)
    sinks = [{"kind": "jsonl"}, {"kind": "tensorboard"}]
    recipe = load(tmp_path, stages=[{**OWN, "name": "again"}, SFT], metrics=sinks)
    assert LocalRun(recipe, "recipe.yaml", (), console=Terminal()).run() == 0
    first, second = planned(recipe)
    assert [one.directory.name for one in (first, second)] == ["1-again", "2-sft"]
    assert all(is_of(one.directory, recipe) for one in (first, second))
    assert after_stages(recipe).model.path == str(second.directory)
    assert str(second.directory.relative_to(tmp_path)) in capfd.readouterr().out.replace("\n", "")

    of_stages = read_record(str(recipe.run_directory)).stages
    for name, steps in of_stages.items():
        assert curve(recipe.run_directory / "tensorboard" / name, "stage/loss") == {
            step.steps: pytest.approx(step.loss) for step in steps
        }
    assert [(name, len(steps)) for name, steps in of_stages.items()] == [("1-again", 2), ("2-sft", 2)]

    outcome = json.loads((first.directory / "stage.json").read_text())
    assert (outcome["steps"], outcome["loss"] > 0) == (2, True)
    models = (recipe.model, *(ModelConfig(path=str(one.directory)) for one in (first, second)))
    begin, between, end = (load_model(model, seed=recipe.run.seed).state_dict() for model in models)
    distances = [sum(float((end[name] - start[name]).abs().sum()) for name in end) for start in (between, begin)]
    assert 0 < distances[0] < distances[1]


def test_a_run_begins_with_the_stage_that_was_done_alone(tmp_path: Path) -> None:
    recipe = load(tmp_path, stages=[SFT, RL])
    (sft,) = planned(recipe)
    sft.directory.mkdir(parents=True)
    mark_complete(sft.directory, recipe, {})
    identity = tracker_identity(sft.directory, "one")
    StageRecord(record_of(sft.directory), 0).write(stage_event(1))
    assert prepare(recipe, resume=False, overwrite=False) == recipe.run_directory
    assert sft.is_complete
    assert tracker_identity(sft.directory, "one") == identity != tracker_identity(sft.directory, "other")


def test_a_chat_template_from_a_file_takes_the_place_of_the_tokenizers(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}^{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}=")
    recipe = load(tmp_path, stages=[SFT, RL], model={**TINY["model"], "chat_template": str(file)})
    check_data(recipe)
    messages = [Message(role="user", content="1+2"), Message(role="user", content="3")]
    rendered, made = Renderer(load_tokenizer(recipe.model)).render(messages, "a prompt"), origin(recipe, 0)
    assert rendered[0] == "^1+2^3="
    file.write_text("{{ messages[0].content }}")
    assert origin(recipe, 0) != made
    file.write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(ConfigError, match=r"model\.chat_template: .*chat\.jinja, line 2: unexpected '}'"):
        check_data(recipe)
    file.unlink()
    with pytest.raises(ConfigError, match=r"model\.chat_template: .* cannot be read"):
        check_data(recipe)


@pytest.mark.slow
def test_a_wrong_option_of_ones_own_stage_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_stages.py").write_text(OWN_STAGE)
    recipe = load(tmp_path, stages=[SFT, {"kind": "own_stages:Repeat", "options": {"txt": "2"}}])
    with pytest.raises(HeadwayError, match="its error stands above"):
        LocalRun(recipe, "recipe.yaml", (), console=Terminal()).run()
    assert "stages[1].options.txt: no such option; did you mean 'text'?" in capfd.readouterr().err.replace("\n", " ")
    assert not (recipe.run_directory / "sft").exists(), "it is told before the first stage runs"
