"""verl's own agent loops, as they are, play on tokens of a real tokenizer.

`make test-peft` runs these with verl. Of hydra, which verl imports for its command line, an empty module stands in.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.broker.installation import is_installed
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.agents.client import EndpointClient
from headway.rollout_workers.agents.endpoint.server import Endpoint
from headway.rollout_workers.agents.episode import AgentEpisode, Outcome
from headway.rollout_workers.agents.kinds import open_agent
from headway.rollout_workers.engines.base import Chunk, GenerationRequest
from headway.rollout_workers.samples.recorder import Recorder

from .chat_models import MODELS, save_chat_model
from .scripted import ScriptedSessions
from .scripted_episodes import a_task
from .sessions import Attempt, Engine

pytestmark = [
    pytest.mark.skipif(not is_installed("verl"), reason="verl is not installed: make test-peft"),
    pytest.mark.filterwarnings("ignore"),  # verl's imports warn of their own dependencies
    pytest.mark.timeout(600),
]
ROLLOUT = {
    "prompt_length": 1000,
    "response_length": 1000,
    "full_determinism": False,
    "multi_turn": {
        "max_user_turns": 4,
        "max_assistant_turns": 4,
        "max_parallel_calls": 1,
        "max_tool_response_length": 100,
        "tool_response_truncate_side": "middle",
        "format": "hermes",
    },
}


class WrittenEngine(Engine):
    """Answers with texts in the tokens of a model, and the token that ends its turn."""

    def __init__(self, directory: Path, *answers: str) -> None:
        super().__init__(*answers)
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)

    async def generate(self, request: GenerationRequest, recorder: Recorder) -> None:
        """Record one turn."""
        self.asked.append(request)
        sampled = self.tokenizer(self.answers.pop(0) + "<|im_end|>", add_special_tokens=False).input_ids
        logprobs = [self.logprob - number for number in range(len(sampled))]
        recorder.add(Chunk(token_ids=sampled, logprobs=logprobs, version=self.version, finish_reason="stop"))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small tokenizer with Qwen2.5's template."""
    hydra, utils = ModuleType("hydra"), ModuleType("hydra.utils")
    hydra.utils = utils  # type: ignore[attr-defined]
    for module in (hydra, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    save_chat_model(tmp_path, MODELS["hermes"])
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')  # by which verl knows its template
    return tmp_path


async def play(loop: str, engine: WrittenEngine, model: Path) -> tuple[Outcome, Attempt]:
    sessions, attempt, client = ScriptedSessions(), Attempt(engine, most_tokens=5000), EndpointClient()
    sessions.by_name["lease"] = attempt.session
    endpoint = await Endpoint.start(sessions)
    url = endpoint.url_of("lease")
    config = {"actor_rollout_ref": {"rollout": ROLLOUT}}
    options = {"loop": loop, "tokenizer": str(model), "trainer_config": config}
    agent = open_agent("verl_agent_loop", options, ImportRoots(("tests", "verl"), Path.cwd()))

    async def call(path: str, asked: dict[str, Any]) -> Any:
        return await client.post(url, path, asked)

    try:
        return await agent.rollout(AgentEpisode(url, "lease", call), a_task("6*7")), attempt
    finally:
        await client.close()
        await endpoint.close()


def text_of(engine: WrittenEngine, tokens: Sequence[int]) -> str:
    return str(engine.tokenizer.decode(tokens))


async def test_verls_loop_of_one_turn_plays_an_episode(model: Path) -> None:
    engine = WrittenEngine(model, "it is 42")
    result, attempt = await play("verl.experimental.agent_loop:SingleTurnAgentLoop", engine, model)
    assert isinstance(result, dict)
    assert result["num_turns"] == 2.0
    assert result.get("reward") is None, "the run's rewards score the answer, as verl's own would"
    turn = attempt.recorder.turn(0)
    assert text_of(engine, turn.token_ids) == "it is 42<|im_end|>"
    assert text_of(engine, turn.context).endswith("<|im_start|>user\n6*7<|im_end|>\n<|im_start|>assistant\n")


async def test_verls_loop_with_tools_goes_on_with_the_tokens_that_were_sampled(model: Path) -> None:
    call = '<tool_call>\n{"name":  "calculate", "arguments": {"expression": "6*7"}}\n</tool_call>'
    engine = WrittenEngine(model, call, "it is 42")
    result, attempt = await play("tests.rollout_workers.agents.programs.verl_loops:WithTools", engine, model)
    assert isinstance(result, dict)
    assert result["num_turns"] == 4.0
    assert (attempt.session.counts["turns"], attempt.session.counts["forks"]) == (2, 0)
    first, second = attempt.recorder.row(0), engine.asked[1].prompt_tokens
    assert second[: len(first)] == first
    written = "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert text_of(engine, second[len(first) :]) == f"\n{written}"
