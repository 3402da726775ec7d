"""`headway chat` shows the model the conversation, prints its answers, and stops an answer at Ctrl-C."""

import io
import itertools
import json
import signal
import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from headway.broker.errors import ConfigError
from headway.deploy.cli.main import answer
from headway.deploy.roles.chat import Chat
from headway.deploy.roles.trained_model import GenerationSettings, find_trained, settings_of
from headway.rollout_workers.engines.embedded.decoder import Decoder, Sample

from .tiny_model import SMALL, greedy, make_model

TEMPLATE = (
    "{% for message in messages %}{{ {'system': '+', 'user': '^', 'assistant': '='}[message.role] }}"
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "chat", TEMPLATE)


def text(model: Path, prompt: str, new_tokens: int = 8) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return str(tokenizer.decode(greedy(model, prompt, new_tokens), skip_special_tokens=True))


def type_lines(monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))


def opened(model: Path, *overrides: str, system: str = "") -> Chat:
    found = find_trained(str(model))
    return Chat(found, settings_of(found, [*SMALL, *overrides], 0.0, GenerationSettings), system)


def test_a_conversation_is_rendered_with_all_that_was_said_before(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "1+2\n\n 3 \n")
    assert answer(["chat", str(model), *SMALL, "--temperature", "0", "--system", "9", "--json"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["text"] == text(model, "+9^1+2=")
    assert second["text"] == text(model, f"+9^1+2={first['text']}^3=")
    assert second["forgotten"] == 0


def test_without_a_template_each_line_is_continued(
    plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "1+2=\nletters\n3")
    assert answer(["chat", str(plain), *SMALL, "--temperature", "0"]) == 0
    said = capsys.readouterr()
    shown = [line.removesuffix(" [cut at its longest length]") for line in said.out.splitlines()]
    assert shown == [text(plain, "1+2="), text(plain, "3")]
    assert "no chat template: it continues each line" in said.err
    assert "the message has the character 'l'" in said.err


def test_an_answer_is_heard_piece_by_piece(model: Path) -> None:
    pieces: list[str] = []
    with opened(model, "sampling.max_new_tokens=40") as chat:
        reply = chat.say("5", pieces.append)
    assert "".join(pieces) == reply.text == text(model, "^5=", 40)


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread slows down after 20 tokens until the answer is stopped, however late this thread is.

    With 59 tokens the context would have no room for the earlier turns.
    """
    is_stopped, steps, step = threading.Event(), itertools.count(), Decoder.step

    def decode(decoder: Decoder) -> list[Sample]:
        if next(steps) >= 20:
            is_stopped.wait(1)
        return step(decoder)

    def press_ctrl_c(piece: str) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("headway.rollout_workers.engines.embedded.embedded_engine.FLUSH_S", 0.0)
    monkeypatch.setattr(Decoder, "step", decode)
    with opened(model, "engine.max_model_len=128", "sampling.max_new_tokens=100") as chat:
        stopped = chat.say("5", press_ctrl_c)
        is_stopped.set()
        following = chat.say("6")
    assert stopped.finish_reason == "interrupted"
    assert 0 < stopped.tokens < 59
    assert following.text
    assert text(model, f"^5={stopped.text}^6=", 100).startswith(following.text)


def test_the_oldest_messages_are_forgotten_where_the_model_has_no_room(model: Path) -> None:
    with opened(model, system="8") as chat:
        replies = [chat.say("1+2+3+4+5") for _ in range(5)]
        assert [reply.forgotten for reply in replies[:2]] == [0, 0]
        assert replies[-1].forgotten > 0
        with pytest.raises(ConfigError, match=r"The message has \d+ tokens, and engine.max_model_len=64"):
            chat.say("7" * 70)
        assert chat.say("2").text


def test_a_system_message_without_a_template_is_refused(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["chat", str(plain), *SMALL, "--system", "1"]) == 1
    assert "no chat template. Leave it out." in capsys.readouterr().err
