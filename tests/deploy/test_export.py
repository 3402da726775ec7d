"""A model that `headway export` writes computes the same as the backend, and appears as a whole or not at all."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from headway.deploy.cli.main import answer
from headway.deploy.recipe.resolve import dump_recipe, load_recipe
from headway.learner.backends import open_backend
from headway.learner.backends.snapshots import SnapshotWriter
from headway.learner.checkpoint import LINK, LearnerState, seal
from headway.learner.ranks import Ranks
from headway.learner.stages.loop import saved_tensors, weights_digest
from tests.full_disk import no_files_over
from tests.learner.tiny import OPTIMIZER, model_config

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
STEPS = (2, 4)


def make_run(directory: Path, backend: str = "fsdp") -> Path:
    """Make a run with two checkpoints of different weights, the older one of them the best."""
    model = model_config("qwen3_moe", tied=False)
    recipe = load_recipe("arithmetic.yaml", [f"learner.backend={backend}"])
    directory.mkdir()
    (directory / "config.yaml").write_text(dump_recipe(msgspec.structs.replace(recipe, model=model)))
    for step in STEPS:
        policy = open_backend(backend, model, OPTIMIZER, seed=step)
        saving = SnapshotWriter(Ranks.of(policy), checkpoint(directory, step), {"": policy}, None)
        saving.finish(partial(seal, state=LearnerState(incarnation=1, step=step)))
    (directory / "checkpoints" / LINK).symlink_to(Path("1", f"step_{STEPS[0]}"))
    return directory


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / "1" / f"step_{step}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


def export(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Return the command's --json output, or its error where it fails."""
    code = answer(["export", *map(str, arguments), "--json"])
    said = capsys.readouterr()
    return {"error": said.err} if code else {"code": code, **json.loads(said.out)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")  # Megatron's, of its own calls
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_transformers_computes_from_the_files_what_the_backend_computes(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint(make_run(tmp_path / "run", backend), 4)
    tokenizer = AutoTokenizer.from_pretrained(source)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    said = export(capsys, source, "--out", tmp_path / "out")
    assert "error" not in said, said
    assert said["check"]["backend"] == backend
    assert 0 < said["check"]["mean_difference"] < 1e-5
    assert said["dtype"] == "float32"
    assert weights_digest(saved_tensors(tmp_path / "out")) == weights_digest(saved_tensors(source))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sum(weight.numel() for weight in model.parameters()) == said["parameters"]
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported("1+2=").input_ids == tokenizer("1+2=").input_ids
    assert exported.apply_chat_template([{"role": "user", "content": "1+2="}], tokenize=False) == "1+2="
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == tokenizer.eos_token_id
    assert not {"learner.json", "files.json"} & {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(("choice", "step"), [([], 4), (["--step", "2"], 2), (["--best"], 2)])
def test_a_run_means_its_newest_whole_checkpoint_or_the_one_that_is_asked_for(
    choice: list[str], step: int, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = export(capsys, run, *choice, "--out", tmp_path / "out", "--no-check")
    assert said["checkpoint"] == str(checkpoint(run, step))
    assert said["check"] is None
    assert weights_digest(saved_tensors(tmp_path / "out")) == weights_digest(saved_tensors(checkpoint(run, step)))


def test_weights_get_another_number_format(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = export(capsys, run, "--out", tmp_path / "out", "--dtype", "bf16")
    assert said["dtype"] == "bfloat16"
    assert said["check"]["mean_difference"] > 1e-4, "weights were rounded"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_a_checkpoint_whose_files_differ_from_its_state_is_exported_only_without_the_check(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint(shutil.copytree(run, tmp_path / "run"), 4)
    tensors = load_file(source / "model.safetensors")
    first, second = (f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1))
    tensors[first], tensors[second] = tensors[second], tensors[first]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    assert "on average from those of the backend fsdp" in export(capsys, source, "--out", out)["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing is left"
    assert export(capsys, source, "--out", out, "--no-check")["check"] is None


def test_what_is_there_is_replaced_only_if_asked_and_never_unless_it_is_an_export(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    (other / "letters.txt").write_text("mine")
    assert "code" in export(capsys, run, "--out", out, "--no-check", "--step", 2)
    assert "exists. Choose another --out" in export(capsys, run, "--out", out, "--no-check")["error"]
    assert "code" in export(capsys, run, "--out", out, "--no-check", "--force")
    assert weights_digest(saved_tensors(out)) == weights_digest(saved_tensors(checkpoint(run, 4)))
    assert "something else" in export(capsys, run, "--out", other, "--no-check", "--force")["error"]
    taken = checkpoint(run, 2)
    assert "learner's checkpoint" in export(capsys, run, "--out", taken, "--no-check", "--force")["error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_the_directory_may_be_the_one_that_the_user_is_in(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    said = export(capsys, run, "--out", ".", "--no-check", "--force")
    assert said["directory"] == str(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with no_files_over(20_000):
        said = export(capsys, run, "--out", tmp_path / "out", "--no-check")
    assert "could not be written" in said["error"]
    assert "Make room" in said["error"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere' is no directory with a config.json, so it is no model. There is no run 'nowhere'"),
        (["RUN", "--step", "3"], "no whole checkpoint at step 3; --step can be 2, 4."),
        (["RUN", "--step", "2", "--best"], "--step and --best exclude each other."),
        (["RUN/checkpoints/1/step_2", "--best"], "--step and --best choose among the checkpoints of a run."),
    ],
)
def test_a_choice_that_names_no_model_is_refused(
    arguments: list[str], message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [argument.replace("RUN", str(run)) for argument in arguments]
    assert message in export(capsys, *named, "--out", tmp_path / "out")["error"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")  # Megatron's, of its own calls
@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_a_reward_model_is_exported_with_its_scores(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", kind)
    backend = open_backend(kind, model_config("qwen3_moe"), OPTIMIZER, seed=2, head="score")
    source = run / "stages" / "1-scores"
    source.parent.mkdir()
    saving = SnapshotWriter(Ranks.of(backend), source, {"": backend}, None)
    saving.finish(partial(seal, state=LearnerState(incarnation=0, step=1)))
    said = export(capsys, source, "--out", tmp_path / "out")
    assert (said["check"]["compared"], said["check"]["tokens"]) == ("scores", 16)
    assert said["check"]["mean_difference"] < 1e-5
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert (exported.config.num_labels, tuple(exported.score.weight.shape)) == (1, (1, 32))
    half = export(capsys, source, "--out", tmp_path / "half", "--dtype", "bf16")
    assert "error" not in half, half
    assert half["check"]["mean_difference"] < 0.1
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"score.weight": -tensors["score.weight"]}, source / "model.safetensors", {"format": "pt"})
    wrong = export(capsys, source, "--out", tmp_path / "wrong")["error"]
    assert "the scores of 16 tokens differ" in wrong
    assert not (tmp_path / "wrong").exists()
