"""A user's own prompt source runs in a process of its own, so a hang or an exit ends nothing else."""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from headway.broker.errors import ConfigError, UserCodeError
from headway.learner.config import PromptsConfig, SftPhaseConfig
from headway.learner.data.examples import Example, open_examples
from headway.learner.data.prompts import open_source
from headway.learner.data.prompts.base import Item, PromptSource

OWN = "tests.learner.custom_sources"


def opened(name: str, path: str = "task", *, deadline_s: float = 60.0, **options: Any) -> PromptSource:
    return open_source(PromptsConfig(kind=f"{OWN}:{name}", path=path, deadline_s=deadline_s, options=options), seed=0)


def test_a_source_of_ones_own() -> None:
    source = opened("ThreeTasks", answer="no")
    assert source.size == 3
    assert source.train(0, 1) == Item(content="task1", ground_truth="no", data_source="own")
    assert source.held_out(1) == [Item(content="other", ground_truth="no", data_source="own", extra_info={"a": [1]})]


def test_one_that_hangs_is_given_up_after_two_deadlines_and_others_come_all_the_same(tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    source = opened("HangsAtTwo", str(tries), deadline_s=1.0)
    source.train(0, 1)
    with pytest.raises(
        UserCodeError, match=rf"prompts\.kind={OWN}:HangsAtTwo: train\(0, 2\) ran past its deadline of 1 s"
    ):
        source.train(0, 2)
    assert source.train(0, 0).content == f"{tries}0"
    assert tries.read_text().split() == ["1", "2", "2", "0"]


def test_one_that_hangs_once_is_asked_again(tmp_path: Path) -> None:
    assert opened("HangsOnce", str(tmp_path / "tried"), deadline_s=1.0).train(0, 0).ground_truth == "yes"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Exits", r"train\(0, 0\) called sys\.exit\(0\)"),
        ("EndsItsProcess", r"train\(0, 0\) ended its process with exit code 0"),
        ("WrongItems", r"train\(0, 0\) raised ValidationError: Expected `str \| array`, got `int` - at `\$\.content`"),
    ],
)
def test_one_that_cannot_give_an_item_says_why(name: str, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        opened(name).train(0, 0)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Refuses", ConfigError, "raised ValueError: there is no data set of that name"),
        ("ExitsWhenOpened", UserCodeError, "opening it ended its process with exit code 0"),
        ("ThreeTask", ConfigError, "did you mean tests.learner.custom_sources:ThreeTasks"),
    ],
)
def test_one_that_cannot_be_opened_says_why(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"{OWN}:{name}.*{message}"):
        opened(name)


def examples_of(name: str, **options: Any) -> Iterator[Example]:
    return open_examples(SftPhaseConfig(kind=f"{OWN}:{name}", path="p", deadline_s=1.0, options=options), seed=7)


def test_examples_of_ones_own() -> None:
    assert [example.response for example in examples_of("examples", words=40)] == [f"7 {i}" for i in range(40)]
    with pytest.raises(ConfigError, match=r"did you mean tests\.learner\.custom_sources:examples"):
        examples_of("example")


def test_examples_that_do_not_come_end_the_warm_up() -> None:
    examples = examples_of("examples_that_hang")
    assert len(list(islice(examples, 16))) == 16
    with pytest.raises(UserCodeError, match=r"sft\.phases\.kind=.*examples_that_hang: next\(16\) ran past"):
        next(examples)


def test_its_process_imports_no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "light.py").write_text(
        "import sys\nfrom tests.learner.custom_sources import ThreeTasks\n"
        "class Source(ThreeTasks):\n    @property\n    def size(self): return int('torch' in sys.modules)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setenv("HEADWAY_IMPORT_PATH", str(tmp_path))
    assert open_source(PromptsConfig(kind="light:Source"), seed=0).size == 0
