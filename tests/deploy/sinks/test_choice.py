"""`metrics:` of a recipe chooses the sinks, a user's own by import path; a wrong choice is refused with a remedy."""

from pathlib import Path

import pytest

from headway.broker.errors import ConfigError
from headway.deploy.observe.sinks import make_sink, open_sinks
from headway.deploy.observe.sinks.jsonl import JsonlSink
from headway.deploy.recipe.recipe import SinkConfig
from headway.deploy.recipe.resolve import dump_recipe, load_recipe
from headway.deploy.recipe.trust import check_paths
from tests.deploy.runs import sink_run, step_event

TOY = """
from pathlib import Path


class Toy:
    is_record = False
    wants_heartbeats = True

    def __init__(self, suffix=".txt"):
        self.suffix = suffix

    def open(self, run):
        self.file = (run.directory / f"toy{self.suffix}").open("w")

    def write(self, event):
        print(type(event).__name__, file=self.file)

    def close(self):
        self.file.close()


class Half:
    is_record = False

    def write(self, event):
        pass
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module outside of the repository."""
    (tmp_path / "toy_sinks.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    return "toy_sinks"


def test_the_record_is_written_unless_more_is_said() -> None:
    assert load_recipe("arithmetic.yaml").metrics == (SinkConfig(kind="jsonl"),)


def test_ones_own_sink_gets_its_options_and_every_event(toy: str, tmp_path: Path) -> None:
    configs = (SinkConfig(kind="jsonl"), SinkConfig(kind=f"{toy}:Toy", options={"suffix": ".log"}))
    with open_sinks(configs, sink_run(tmp_path / "run")) as sinks:
        assert sinks.wants_heartbeats
        sinks.write(step_event(0))
    assert (tmp_path / "run" / "toy.log").read_text() == "StepEvent\n"
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert sinks.lost == {f"metrics[1] ({toy}:Toy)": 0}


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("jsonnl", {}, r"metrics\[1\]\.kind: there is no 'jsonnl'; did you mean 'jsonl'\? Known: .*; your own as"),
        ("jsonl", {"path": "x"}, r"metrics\[1\]\.options\.path: no such option\. Known: none\."),
        ("tensorboard", {"directori": "x"}, r"options\.directori: no such option; did you mean 'directory'\?"),
        ("tensorboard", {"directory": 1}, r"metrics\[1\]\.options: Expected `str`, got `int`"),
        ("toy_sinks:Toi", {}, "did you mean toy_sinks:Toy"),
        ("toy_sinks:Toy", {"prefix": 1}, r"metrics\[1\]: toy_sinks:Toy cannot be made: TypeError: .*'prefix'"),
        (
            "toy_sinks:Half",
            {},
            "makes a Half, which lacks close, open, wants_heartbeats; .*deploy.observe.sinks.base:MetricSink",
        ),
        ("subprocess:Popen", {}, "Python's standard library, which no configuration may call"),
    ],
)
@pytest.mark.usefixtures("toy")
def test_a_sink_that_there_is_not_is_told(kind: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_sink(SinkConfig(kind=kind, options=options), "metrics[1]")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("metrics=[{kind: jsonl}, {kind: jsonnl}]", r"metrics\[1\]\.kind: there is no 'jsonnl'; did you mean 'jsonl'"),
        ("metrics=[{kind: jsonl}, {kindd: a}]", r"metrics\[1\]\.kindd"),
        ("metrics=[{kind: jsonl, options: {path: x}}]", r"metrics\[0\]\.options\.path: no such option"),
        ("metrics=[]", "metrics must have one sink of kind jsonl: it is the run's record"),
        ("metrics=[{kind: jsonl}, {kind: jsonl}]", "metrics must have one sink of kind jsonl"),
    ],
)
def test_a_recipe_is_told_before_anything_starts(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_recipe("arithmetic.yaml", [override])


def test_a_path_that_nobody_would_import_is_told_before_anything_starts() -> None:
    recipe = load_recipe("arithmetic.yaml", ["metrics=[{kind: jsonl}, {kind: 'subprocess:Popen'}]"])
    with pytest.raises(ConfigError, match=r"metrics\[1\]\.kind: 'subprocess:Popen' is not imported"):
        check_paths(recipe)


def test_sinks_are_saved_with_the_recipe(tmp_path: Path) -> None:
    override = "metrics=[{kind: jsonl}, {kind: 'mine:Sink', options: {project: p}}]"
    recipe = load_recipe("arithmetic.yaml", [override])
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "config.yaml") == recipe


def test_the_record_is_the_first_of_the_built_in_sinks() -> None:
    assert isinstance(made := make_sink(SinkConfig(kind="jsonl"), "metrics[0]"), JsonlSink)
    assert made.is_record
