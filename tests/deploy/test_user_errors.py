"""The command line answers a user's mistake with one helpful paragraph, and with a traceback only if asked for one."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.run.stage_output import mark_complete
from tests.end_to_end.recipes import MODEL
from tests.learner.tiny import model_config

from .test_cli import NOWHERE, headway
from .tiny_model import make_model

BROKEN_JSONL = '{"prompt": "1+1=", "ground_truth": "2"}\n{"prompt": \n'
ROW = '{"prompt": "what?", "ground_truth": "2"}\n'
JSONL_RECIPE = {
    "model": MODEL,
    "prompts": {"kind": "jsonl", "path": "rows.jsonl", "options": {"held_out_rows": 1}},
    "rewards": [{"kind": "arithmetic"}],
    "evaluation": {"prompts": 1},
    "sft": {"phases": [{"kind": "arithmetic", "max_steps": 1}]},
}


def check_error(*arguments: str, cwd: Path, message: str, **environment: str) -> None:
    """Assert that the command fails with exactly one paragraph."""
    answer = headway(*arguments, cwd=cwd, HF_HUB_OFFLINE="1", **environment)
    assert answer.returncode not in (0, 70), answer.stderr
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr
    assert len(answer.stderr.splitlines()) == 1, answer.stderr
    assert answer.stderr.startswith("Error: ")


@pytest.mark.slow
def test_a_misspelt_option_of_the_loss_is_told_before_the_warm_up(tmp_path: Path) -> None:
    check_error(
        *("sft", "arithmetic.yaml", "algorithm.objective.options.clip_hi=0.3", "--output", "out"),
        *("sft.phases=[{kind: arithmetic, max_steps: 1}]", "evaluation.prompts=1"),
        cwd=tmp_path,
        message="algorithm.objective.options.clip_hi: ppo_clip has no such option; did you mean 'clip_high'?",
    )
    assert not (tmp_path / "out").exists()


@pytest.fixture
def web_server() -> Iterator[str]:
    """Yield the port of a server that answers, and is no Redis."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def answer() -> None:
            while True:
                try:
                    client, _ = listening.accept()
                except OSError:
                    return
                with client:
                    client.recv(4096)
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.slow
def test_a_server_that_is_no_redis(web_server: str, tmp_path: Path) -> None:
    for arguments in (["broker", "--url", web_server], ["status", "--run", "x", "--broker", web_server]):
        check_error(*arguments, cwd=tmp_path, message=web_server)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("learner", "--run", "arithmetic", "--broker", NOWHERE), ("run",)])
def test_overwrite_takes_nothing_away_before_the_server_answers(arguments: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "runs" / "arithmetic"
    run.mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        (run / name).touch()
    check_error(
        *(arguments[0], "arithmetic.yaml", f"broker.url={NOWHERE}", *arguments[1:], "--overwrite"),
        cwd=tmp_path,
        message=f"No answer from the broker at {NOWHERE}",
    )
    assert (run / "metrics.jsonl").exists()


@pytest.mark.slow
def test_under_a_torchrun_of_ones_own_the_warm_up_comes_first(tmp_path: Path) -> None:
    arguments = ["learner", "arithmetic.yaml", "--broker", NOWHERE, "--run", "x"]
    sft = tmp_path / "runs" / "x" / "sft"
    for rank in ("0", "1"):
        check_error(
            *arguments,
            cwd=tmp_path,
            RANK=rank,
            message="run `headway sft RECIPE --output runs/x/sft` first",
        )
    assert not (tmp_path / "runs").exists()
    sft.mkdir(parents=True)
    mark_complete(sft, load_recipe("arithmetic.yaml", ["run.name=x"]), {})
    check_error(*arguments, cwd=tmp_path, RANK="0", message="No answer from the broker")
    check_error(*arguments, "--overwrite", cwd=tmp_path, RANK="0", message="and leave --overwrite out")
    assert sft.exists()


@pytest.mark.slow
def test_an_error_that_a_role_finds(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(BROKEN_JSONL)
    (tmp_path / "recipe.yaml").write_text(json.dumps(JSONL_RECIPE))
    check_error("sft", "recipe.yaml", cwd=tmp_path, message="rows.jsonl:2: this is no JSON")


@pytest.mark.slow
def test_a_model_that_cannot_be_opened_ends_a_run_before_it_begins(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "recipe.yaml").write_text(json.dumps({**JSONL_RECIPE, "model": {"path": "model"}, "sft": {}}))
    check_error("run", "recipe.yaml", cwd=tmp_path, message="(pytorch_model.bin) are not read")
    assert not [*tmp_path.rglob("config.yaml"), *tmp_path.rglob("*.log")], "no run, no process"


@pytest.mark.slow
def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    from headway.learner.models.pretrained import load_model

    load_model(model_config("qwen3")).save_pretrained(tmp_path / "model")
    check_error(
        *("eval", "arithmetic.yaml", "--checkpoint", "model"),
        cwd=tmp_path,
        message="model has no tokenizer: its files (tokenizer.json, tokenizer_config.json) are missing.",
    )
