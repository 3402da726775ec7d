"""The parts of `headway run`: its suggestions at the end, and the warm-up of a model that is there already."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch

from headway.deploy.launch.commands import WorkerCommand, connection
from headway.deploy.launch.local_run import LocalRun, program, run_stages
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.standalone import _say_how_it_ended
from headway.deploy.run.run_directory import prepare
from headway.deploy.run.stage_output import after_stages
from headway.deploy.terminal import Terminal
from headway.learner.config import ModelConfig
from headway.learner.models.pretrained import load_model, load_tokenizer
from tests.end_to_end.recipes import MODEL, TINY


def hints(directory: Path, code: int, *overrides: str) -> str:
    """Return the lines that Headway prints after a run with these overrides."""
    recipe = load_recipe("arithmetic.yaml", overrides)
    said = StringIO()
    LocalRun(recipe, "arithmetic.yaml", overrides, Terminal(file=said))._conclude(directory, code)
    return said.getvalue()


def test_hints_name_the_runs_own_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ("run.name=stale", "learner.steps=3", "sampling.max_new_tokens=9")
    directory = tmp_path / "runs" / "stale"
    (directory / "checkpoints" / "1" / "step_3").mkdir(parents=True)
    assert "go on from the last checkpoint:\n" in (text := hints(directory, 130, *overrides))
    assert " run runs/stale/config.yaml --resume\n" in text
    text = hints(directory, 0, *overrides)
    assert " report runs/stale\n" in text
    assert " eval runs/stale/config.yaml --checkpoint runs/stale/checkpoints/1/step_3\n" in text
    assert f" run arithmetic.yaml learner.steps=3 {overrides[2]} staleness.max_lag=8 run.name=stale-8\n" in text


def test_a_learner_that_was_stopped_is_told_to_go_on_from_a_checkpoint_that_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe("arithmetic.yaml", [f"run.directory={tmp_path}", "run.name=stopped"])
    _say_how_it_ended(recipe, is_finished=False)
    assert "There is no checkpoint yet: with --resume it begins with the first step" in capsys.readouterr().out
    (tmp_path / "stopped" / "checkpoints" / "1" / "step_1").mkdir(parents=True)
    _say_how_it_ended(recipe, is_finished=False)
    assert "To go on from the last checkpoint, add --resume." in capsys.readouterr().out


def test_a_run_that_ended_without_a_checkpoint_is_not_told_of_one(tmp_path: Path) -> None:
    text = hints(tmp_path, 130)
    assert "begin with the first step, since there is no checkpoint yet; finished stages stay:\n" in text
    assert " --resume\n" in text


@pytest.mark.parametrize("called", ["somewhere/headway/__main__.py", "venv/bin/headway"])
def test_hints_name_a_command_that_can_be_typed(called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "venv" / "bin" / "headway"
    own.parent.mkdir(parents=True)
    own.touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.executable", str(own.with_name("python")))
    monkeypatch.setattr("sys.argv", [called])
    assert program() == "venv/bin/headway"
    own.unlink()
    assert program() == called


def test_the_table_tells_samples_that_the_loss_left_out(tmp_path: Path) -> None:
    for count in (0, 276):
        (tmp_path / "summary.json").write_text(json.dumps({"steps": 10, "untrained_trajectories": count}))
        rows = [line.split() for line in hints(tmp_path, 0).splitlines() if "left out of the loss" in line]
        assert [row[-2] for row in rows] == ["276"] * bool(count)


@pytest.mark.parametrize("found", [{}, {"agreement_mean": 0.0123, "agreement_worst": 0.4}, {"agreement_mean": 0.0}])
def test_the_table_tells_how_far_engine_and_learner_were_apart(found: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 10, **found}))
    shown = hints(tmp_path, 0).splitlines()
    rows = [line.split()[-2] for line in shown if "engine and learner" in line or "  largest " in line]
    assert rows == [format(number, ".2g") for number in found.values()]


def test_hints_show_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "arithmetic").mkdir(parents=True)
    text = hints(tmp_path / "runs" / "arithmetic", 0, "broker.url='redis://ali:sesame@h:1?db=1'", "learner.steps=3")
    assert "sesame" not in text
    assert " run arithmetic.yaml 'broker.url=redis://ali@h:1?db=1' learner.steps=3 " in text


def test_children_find_the_files_that_a_url_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_BROKER_PASSWORD_FILE", "secret")
    environment = connection("rediss://h:1/0?ssl_ca_certs=certs/ca.pem&db=1&password_file=/p", "r")
    assert environment["HEADWAY_BROKER"] == f"rediss://h:1/0?ssl_ca_certs={tmp_path}/certs/ca.pem&db=1&password_file=/p"
    assert environment["HEADWAY_BROKER_PASSWORD_FILE"] == f"{tmp_path}/secret"
    assert connection("unix:///a/b", "r")["HEADWAY_BROKER"] == "unix:///a/b"


def test_workers_share_the_gpus_that_they_are_given(tmp_path: Path) -> None:
    free = WorkerCommand(url="redis://h", run="r", arguments=(), private=tmp_path, logs=tmp_path, threads=1)
    bound = replace(free, devices=["1", "2,3"])
    assert [bound(number).variables()["CUDA_VISIBLE_DEVICES"] for number in range(3)] == ["1", "2,3", "1"]
    assert "CUDA_VISIBLE_DEVICES" not in free(0).variables()


@pytest.mark.slow
def test_a_warm_up_starts_from_the_recipes_own_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = load_recipe(write(tmp_path / "base.yaml", {}))
    expected = load_model(base.model, seed=5)
    expected.save_pretrained(tmp_path / "model")
    load_tokenizer(base.model).save_pretrained(tmp_path / "model")
    phase = {"kind": "arithmetic", "learning_rate": 1e-30, "batch_size": 4, "max_steps": 1}
    recipe = load_recipe(
        write(
            tmp_path / "recipe.yaml",
            {"model": {"path": str(tmp_path / "model")}, "sft": {"phases": [phase]}, "run": run_below(tmp_path)},
        )
    )
    directory = prepare(recipe, resume=False, overwrite=False)
    capfd.readouterr()
    assert run_stages(recipe, directory, print) == 0
    told = capfd.readouterr()
    assert "Loading weights" not in told.out + told.err
    assert "\r" not in told.out + told.err
    assert after_stages(recipe).model == ModelConfig(path=str(directory / "sft"))
    warmed = load_model(after_stages(recipe).model).state_dict()
    assert all(torch.allclose(tensor, warmed[name], atol=1e-5) for name, tensor in expected.state_dict().items())
    assert run_stages(recipe, directory, lambda _: pytest.fail("it is done already")) == 0


def run_below(directory: Path) -> dict[str, str]:
    return {"name": "mine", "directory": str(directory / "runs")}


def write(path: Path, sections: dict[str, object]) -> Path:
    path.write_text(json.dumps({**TINY, "model": MODEL, "rewards": [{"kind": "arithmetic"}], **sections}))
    return path
