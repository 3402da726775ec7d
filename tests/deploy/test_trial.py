"""A reward's fault is told before a run starts anything: by one call, and by all ground truths that it is to read."""

import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headway.broker.errors import ConfigError, HeadwayError
from headway.deploy.launch.commands import RunStart
from headway.deploy.launch.local_run import LocalRun
from headway.deploy.recipe import preflight
from headway.deploy.recipe.preflight import tried
from headway.deploy.recipe.recipe import LauncherConfig, Recipe
from headway.deploy.recipe.resolve import load_recipe
from headway.deploy.roles.learner import train
from headway.deploy.roles.standalone import run_learner
from headway.deploy.terminal import Terminal
from headway.learner.config import PromptsConfig
from headway.learner.data.prompts import open_source

from .tiny_model import make_model

OWN = """
import os
import time
from pathlib import Path


def right(data_source, solution_str, ground_truth, extra_info):
    with Path("calls").open("a") as calls:
        calls.write(f"{data_source} {solution_str} {ground_truth!r} {extra_info}\\n")
    return 1.0


def chat(prompts, completions, **kwargs):
    Path("calls").write_text(prompts[0] + "\\n")
    return [float(len(completions[0][0]["content"]))]


def broken(solution_str):
    return {"answer": 1}["score"]


def judge(solution_str):
    return {"score": float("nan")}


def nothing(completions):
    return [None]


def slow(solution_str):
    time.sleep(600)


def ends(solution_str):
    os._exit(3)


def asks(completions, answer):
    return [1.0]


def steps(completions, trainer_state):
    return [float(getattr(trainer_state, "global_step", 0))]


def lacks(solution_str):
    import no_such_module


class Sums:
    size, truth = None, "5"

    def __init__(self, path, seed):
        pass

    def train(self, epoch, position):
        from headway.learner.data.prompts.base import Item

        return Item(content="2+3=", ground_truth=self.truth, data_source="sums")

    def held_out(self, count):
        return []


class Empty(Sums):
    truth = ""


class Closed(Sums):
    def train(self, epoch, position):
        raise OSError("no way in")
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of the command, with a module of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWAY_IMPORT_PATH", str(tmp_path))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join((str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))
    )
    (tmp_path / "own_trial.py").write_text(OWN)
    return tmp_path


def recipe(kind: str, truths: list[Any], prompt: Any = "2+3=", **reward: Any) -> Recipe:
    rows = [json.dumps({"prompt": prompt, "ground_truth": truth, "level": n}) for n, truth in enumerate(truths)]
    Path("p.jsonl").write_text("\n".join(rows))
    sections = {
        "run": {"name": "trial"},
        "model": {"path": "m"},
        "prompts": {"kind": "jsonl", "path": "p.jsonl"},
        "rewards": [{"kind": kind, **reward}],
        "evaluation": {"prompts": 0},
    }
    Path("r.yaml").write_text(json.dumps(sections))
    return load_recipe("r.yaml", [])


def test_a_function_is_called_once_with_a_row_of_the_data(here: Path) -> None:
    given = recipe("own_trial:right", [["a", 1], "b"])
    assert tried(given, print) is given
    assert (here / "calls").read_text() == "p The answer is 42. ['a', 1] {'level': 0}\n"
    tried(recipe("own_trial:right", ["a"], trial=False), print)
    assert (here / "calls").read_text().count("\n") == 1


def test_a_conversation_is_rendered_for_the_call(here: Path) -> None:
    make_model(here / "m", "{% for m in messages %}^{{ m.content }}={% endfor %}")
    conversation = recipe("own_trial:chat", ["a"], prompt=[{"role": "user", "content": "2+3"}])
    assert tried(conversation, print) is conversation
    assert (here / "calls").read_text() == "^2+3=\n"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("broken", r"raised KeyError: 'score' \(own_trial\.py, line \d+, in broken\)"),
        ("judge", "returned nan"),
        ("nothing", "returned None"),
        ("slow", "ran past its deadline of 2 s"),
        ("ends", "ended its process with exit code 3"),
        ("asks", "asks for answer"),
        ("steps", r"trainer_state\.global_step is not known"),
        ("lacks", "No module named 'no_such_module'"),
    ],
)
def test_a_call_that_fails_is_told_with_key_row_and_remedy(name: str, told: str) -> None:
    given = recipe(f"own_trial:{name}", ["a"], deadline_s=2.0 if name == "slow" else 60.0)
    with pytest.raises(ConfigError, match=rf"rewards\[0\]\.kind: own_trial:{name} .*p\.jsonl:1.*{told}.*trial=false"):
        tried(given, print)


@pytest.mark.parametrize(
    ("kind", "truths", "bad"),
    [
        ("math_verify", ["5", "", r"\frac{1}{2}", ["6"]], [2, 4]),
        ("arithmetic", [5, "6", [7], 8.5], [3, 4]),
        ("reasoning_gym", ["5"], [1]),
    ],
)
def test_a_truth_that_a_built_in_reward_cannot_read_is_named(kind: str, truths: list[Any], bad: list[int]) -> None:
    rows = rf"\({len(bad)} of {len(truths)} rows\)"
    with pytest.raises(ConfigError, match=rf"p\.jsonl:{bad[0]}: .*{rows}.*rewards\[0\]\.unreadable=skip"):
        tried(recipe(kind, truths), print)


def test_a_truth_that_cannot_be_read_is_passed_over_where_that_is_said() -> None:
    said: list[str] = []
    skipping = tried(recipe("math_verify", ["5", "", "7", ["8"]], unreadable="skip"), said.append)
    assert skipping.prompts.options["skip_rows"] == ["p.jsonl:2", "p.jsonl:4"]
    (told,) = said
    assert told.startswith("2 of 4 rows are passed over; the first is p.jsonl:2: ")
    source = open_source(skipping.prompts, 0)
    assert [source.train(0, position).ground_truth for position in range(source.size or 0)] == ["5", "7"]
    assert tried(skipping, said.append) is skipping


def test_a_learner_without_its_workers_reads_all_truths_and_calls_what_is_on_its_machine(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(here / "m")
    start = partial(run_learner, url="redis://127.0.0.1:1", start=RunStart(), is_prepared=False)
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: "):
        start(recipe("math_verify", ["5", ""]))
    prepared: list[Recipe] = []
    monkeypatch.setattr("headway.deploy.roles.standalone.ping", lambda *_: None)
    monkeypatch.setattr("headway.deploy.roles.standalone.prepare", lambda given, **_: prepared.append(given))
    with pytest.raises(TypeError):  # there is no directory
        start(recipe("math_verify", ["5", "", "7"], unreadable="skip"))
    with pytest.raises(ConfigError, match=r"rewards\[0\]\.kind: own_trial:broken .*KeyError"):
        start(recipe("own_trial:broken", ["a"]))
    with pytest.raises(TypeError):
        start(recipe("own_trial:right", ["a"]))
    with pytest.raises(TypeError):
        start(recipe("of_a_worker:right", ["a"]))
    assert [given.prompts.options.get("skip_rows") for given in prepared] == [["p.jsonl:2"], None, None]
    assert (here / "calls").read_text().count("\n") == 1
    assert "of_a_worker:right is not on this machine" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")  # under the user's own torchrun
    monkeypatch.setattr("headway.deploy.roles.learner.train", lambda *_, **__: True)
    assert start(recipe("own_trial:broken", ["a"])) == 0


def of(kind: str, given: Recipe) -> Recipe:
    return msgspec.structs.replace(given, prompts=PromptsConfig(kind=kind, path="me/sums"))


@pytest.mark.parametrize(
    ("source", "row"),
    [("datasets", r"me/sums\[train\]: row 1"), ("own_trial:Sums", r"the first prompt of own_trial:Sums")],
)
def test_functions_are_called_with_a_prompt_of_any_source(
    source: str, row: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "2+3=", "ground_truth": truth, "data_source": "sums"} for truth in ("5", "7")]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda path, name, split: rows))
    said: list[str] = []
    given = of(source, recipe("own_trial:right", []))
    assert tried(given, said.append) is given
    assert (here / "calls").read_text() == "sums The answer is 42. '5' {}\n"
    assert len(said) == 1  # opening it may take a while
    with pytest.raises(ConfigError, match=rf"own_trial:broken fails on a trial call, with {row} .*KeyError"):
        tried(of(source, recipe("own_trial:broken", [])), said.append)
    assert tried(of(source, recipe("own_trial:broken", [], trial=False)), print).prompts.kind == source


def test_the_first_prompt_of_an_own_source_is_read() -> None:
    with pytest.raises(ConfigError, match="math_verify cannot judge a response to it"):
        tried(of("own_trial:Empty", recipe("math_verify", [])), print)
    with pytest.raises(HeadwayError, match=r"prompts\.kind=own_trial:Closed"):
        tried(of("own_trial:Closed", recipe("math_verify", [])), print)
    given = of("own_trial:Sums", recipe("math_verify", []))
    assert tried(given, print) is given
    assert tried(of("own_trial:Closed", recipe("math_verify", [])), print, calls=False).prompts.path == "me/sums"


def test_truths_of_a_data_set_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "2+3=", "ground_truth": truth} for truth in ("5", "", "7")]
    hub = SimpleNamespace(load_dataset=lambda path, name, split: rows)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    given = recipe("math_verify", [])
    given = msgspec.structs.replace(given, prompts=PromptsConfig(kind="datasets", path="me/sums"))
    with pytest.raises(ConfigError, match=r"me/sums\[train\]: row 2: .*\(1 of 3 rows\)"):
        tried(given, print)


def test_on_ray_all_truths_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(Path("m"))
    monkeypatch.setattr("headway.deploy.recipe.preflight.check_packages", lambda *_, **__: None)  # Ray need not be here
    given = msgspec.structs.replace(recipe("math_verify", ["5", ""]), launcher=LauncherConfig(kind="ray"))
    local = LocalRun(given, "r.yaml", (), console=Terminal())
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: "):
        local.prepare()


def keeping(given: Recipe, *names: str) -> Recipe:
    return msgspec.structs.replace(
        given, sampling=msgspec.structs.replace(given.sampling, keep_special_tokens=tuple(names))
    )


@pytest.mark.slow
def test_special_tokens_that_the_model_does_not_have_are_told_before_a_run_starts(here: Path) -> None:
    make_model(here / "m")
    plain = recipe("arithmetic", [5])
    assert tried(right := keeping(plain, "<eos>", "<pad>"), print) is right
    with pytest.raises(ConfigError, match=r"sampling\.keep_special_tokens: .*'<think>'; it has <eos>"):
        tried(keeping(plain, "<eos>", "<think>"), print)


@pytest.mark.parametrize("wrong", ["<think>", "<EOS>", "+", ""])  # "+" is a token that is not special
def test_special_tokens_are_checked_however_a_run_starts(
    wrong: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asked(given: Recipe, method: str, argument: object) -> Any:
        """Load the tokenizer in this process, which takes less time."""
        return getattr(preflight.Rendering(msgspec.to_builtins(given.model), ""), method)(argument)

    monkeypatch.setattr(preflight, "_asked", asked)
    monkeypatch.setattr("headway.deploy.roles.learner.recipe_backend", pytest.fail)
    given = keeping(load_recipe("arithmetic.yaml", []), "<eos>", wrong)
    local = LocalRun(given, "r.yaml", (), console=Terminal())
    alone = partial(run_learner, url="redis://127.0.0.1:1", start=RunStart(), is_prepared=False)
    for start in (local.run, local.prepare, partial(alone, given), partial(train, given, "", resume=False)):
        with pytest.raises(ConfigError, match=rf"sampling\.keep_special_tokens: .*{re.escape(repr(wrong))}"):
            start()
    assert not given.run_directory.exists()


@pytest.mark.slow
def test_special_tokens_of_a_model_that_is_elsewhere_are_left_to_the_learner() -> None:
    given = keeping(recipe("arithmetic", [5]), "<think>")  # there is no directory m
    assert tried(given, print) is given
    assert tried(given, print, calls=False) is given


def test_prompts_that_a_built_in_reward_can_read_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.broker.user_code.pool.HostProcess.start", None)
    for given in (recipe("math_verify", ["5", "-0.5"]), load_recipe("arithmetic.yaml", [])):
        assert tried(given, print) is given
