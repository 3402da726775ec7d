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


@pytest.mark.parametrize("arguments", ["run nowhere", "status --run x --broker http://127.0.0.1:1"])
def test_with_debug_a_traceback_stands_before_the_paragraph(tmp_path: Path, arguments: str) -> None:
    answer = headway(*arguments.split(), "--debug", cwd=tmp_path)
    assert answer.returncode == 1
    assert "Traceback (most recent call last):" in answer.stderr
    assert answer.stderr.splitlines()[-1].startswith("Error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run nowhere", "There is no recipe 'nowhere'."),
        ("run arithmetic.yaml staleness.maxlag=3", "unknown key staleness.maxlag; did you mean staleness.max_lag?"),
        ("run arithmetic.yaml learner.steps=many", "learner.steps is 'many'; expected an integer >="),
        ("run arithmetic.yaml learner.steps", "The override 'learner.steps' has no '='; write it as key=value"),
        ("run arithmetic.yaml run.name=a/b", "run.name is 'a/b'; expected a text"),
        ("run arithmetic.yaml --resume", "There is no run to resume in runs/arithmetic. Start it without --resume."),
        ("run arithmetic.yaml run.directory=file", "file/arithmetic cannot be made or written: "),
        ("run arithmetic.yaml run.directory=/proc/runs", "Choose another place (run.directory=...)"),
        ("run arithmetic.yaml broker.url=http://x", "broker.url is 'http://x'; expected embedded, redis://host:port"),
        (f"run arithmetic.yaml broker.url={NOWHERE}", f"No answer from the broker at {NOWHERE}"),
        ("learner arithmetic.yaml --run a/b --broker redis://127.0.0.1:1", "run.name is 'a/b'; expected a text"),
        ("learner arithmetic.yaml --run x --broker redis://127.0.0.1:1", "No answer from the broker at redis://"),
        ("learner arithmetic.yaml --run x --broker http://127.0.0.1:1", "'http://127.0.0.1:1' is no broker URL"),
        ("workers --run x --broker http://127.0.0.1:1", "'http://127.0.0.1:1' is no broker URL"),
        ("workers --run x --broker redis://127.0.0.1:1", "No answer from the broker at redis://"),
        ("status --run x --broker http://127.0.0.1:1", "'http://127.0.0.1:1' is no broker URL"),
        ("broker --url ftp://x", "'ftp://x' is no broker URL"),
        ("eval arithmetic.yaml --checkpoint file", "file is a file; --checkpoint wants the directory of a model."),
        ("eval arithmetic.yaml --checkpoint .", "'.' is no directory with a config.json, so it is no model."),
    ],
)
def test_an_error_is_one_paragraph(arguments: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_error(*arguments.split(), cwd=tmp_path, message=message)
    assert not (tmp_path / "runs" / "arithmetic").exists()
    assert not (tmp_path / "runs" / "x").exists()


def test_a_misspelt_option_of_the_loss_is_told_before_the_warm_up(tmp_path: Path) -> None:
    check_error(
        *("sft", "arithmetic.yaml", "algorithm.objective.options.clip_hi=0.3", "--output", "out"),
        *("sft.phases=[{kind: arithmetic, max_steps: 1}]", "evaluation.prompts=1"),
        cwd=tmp_path,
        message="algorithm.objective.options.clip_hi: ppo_clip has no such option; did you mean 'clip_high'?",
    )
    assert not (tmp_path / "out").exists()


def test_a_taken_port(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        check_error("broker", "--port", str(port), cwd=tmp_path, message=f"Port {port} on 127.0.0.1 is taken")


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


def test_a_server_that_is_no_redis(web_server: str, tmp_path: Path) -> None:
    for arguments in (["broker", "--url", web_server], ["status", "--run", "x", "--broker", web_server]):
        check_error(*arguments, cwd=tmp_path, message=web_server)


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
@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ((), BROKEN_JSONL, "rows.jsonl:2: this is no JSON"),
        (
            (),
            ROW + ROW.replace("what", "who"),
            "rows.jsonl:2: the prompt has the character 'w', which is not in model.random.alphabet: 'who?'. Add it",
        ),
        (("model.path=/nowhere/model",), ROW, "model.path: there is no directory /nowhere/model."),
        (("model.path=nobody/nothing",), ROW, "model.path: nobody/nothing cannot be loaded: "),
        (("model.path=rows.jsonl",), ROW, "model.path: rows.jsonl is a file."),
        (("prompts.path=none.jsonl",), ROW, "prompts.path: 'none.jsonl' is no file; give the jsonl file's path."),
    ],
)
def test_an_error_that_a_role_finds(changes: tuple[str, ...], rows: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "recipe.yaml").write_text(json.dumps(JSONL_RECIPE))
    check_error("sft", "recipe.yaml", *changes, cwd=tmp_path, message=message)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["pickle", "tokens", "sizes", "shard"])
def test_a_model_that_cannot_be_opened_ends_a_run_before_it_begins(what: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    if what == "pickle":
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
    elif what == "tokens":
        (model / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 1}))
    elif what == "sizes":
        (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**12}))
    else:
        (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "recipe.yaml").write_text(json.dumps({**JSONL_RECIPE, "model": {"path": "model"}, "sft": {}}))
    named = {
        "pickle": "(pytorch_model.bin) are not read",
        "tokens": f"token ids up to {config['vocab_size'] - 1}, and the model's embedding has ",
        "sizes": "config.json.num_hidden_layers is 1000000000000; expected an integer from 1 to 10,000.",
        "shard": "model-00002-of-00002.safetensors",
    }
    check_error("run", "recipe.yaml", cwd=tmp_path, message=named[what])
    assert not [*tmp_path.rglob("config.yaml"), *tmp_path.rglob("*.log")], "no run, no process"


@pytest.mark.slow
def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    from headway.learner.models.model import load_model

    load_model(model_config("qwen3")).save_pretrained(tmp_path / "model")
    check_error(
        *("eval", "arithmetic.yaml", "--checkpoint", "model"),
        cwd=tmp_path,
        message="model has no tokenizer: its files (tokenizer.json, tokenizer_config.json) are missing.",
    )
