"""Every runtime of scorers keeps these promises, compared with a plain transformers forward of one response at a time.

A user's own runtime keeps them too.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from headway.broker.errors import ConfigError
from headway.broker.schema import ScoreRequest
from headway.broker.user_code.import_paths import ImportRoots
from headway.rollout_workers.config import ScorerEngineConfig, ScorersConfig
from headway.rollout_workers.scorers import Runner, ScoringModel, UnfitModelError, unpack_candidates
from headway.rollout_workers.scorers.runtimes import BLOCK_TOKENS, RUNTIMES, abilities_of, gpus_of, open_runner
from headway.rollout_workers.scorers.scorer_client import InProcessScorer
from headway.rollout_workers.scorers.vllm_runtime import SEQUENCES, arguments_of
from tests import plugged

from .marks import VLLM
from .models import forward_logprobs
from .reward_models import TOKENS, save_encoder, save_model, score_of

CONFIG = ScorersConfig()
KEY = "rewards[0].path"
POLICYS_TOKENS = TOKENS - 9
"""The policy's number of tokens: the teacher has more, and its vocabulary is padded."""
MOST_TOKENS = 64


@dataclass
class Case:
    """A runtime's runners, and the models that they hold."""

    engine: ScorerEngineConfig
    reward_model: PreTrainedModel
    rewarding: Runner
    teacher: PreTrainedModel
    teaching: Runner

    def temperatures(self) -> Iterator[float]:
        yield 1.0
        if abilities_of(self.engine).any_temperature:
            yield 0.7


@pytest.fixture(
    scope="module",
    params=["transformers", plugged.RUNTIME, pytest.param("vllm", marks=VLLM)],
    ids=["transformers", "own", "vllm"],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    directory, config = tmp_path_factory.mktemp("scorers"), ScorersConfig(engine=ScorerEngineConfig(kind=request.param))
    reward_model = save_model(directory / "reward_model", scores=True)
    teacher = save_model(directory / "teacher", scores=False)
    save_model(directory / "policy", scores=False)
    settings = json.loads((directory / "policy" / "config.json").read_text())
    (directory / "policy" / "config.json").write_text(json.dumps({**settings, "vocab_size": POLICYS_TOKENS}))
    plugged.write(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        patch.delitem(sys.modules, "plugged", raising=False)

        def opened(kind: str) -> Runner:
            return open_runner(
                kind,
                str(directory / kind),
                config,
                key=KEY,
                policy=directory / "policy",
                most_tokens=MOST_TOKENS,
                roots=ImportRoots((request.param,) if ":" in request.param else ()),
            )

        yield Case(config.engine, reward_model, opened("reward_model"), teacher, opened("teacher"))


def assert_same(found: Any, wanted: Any) -> None:
    """Assert that scores agree up to float32's rounding in sums of another order."""
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def requests(lengths: Sequence[tuple[int, int]], *, below: int = TOKENS, **fields: Any) -> list[ScoreRequest]:
    """Return responses that end with the highest token, which is both stop and padding token."""
    rng = np.random.default_rng(0)
    found = []
    for prompt, response in lengths:
        tokens = rng.integers(0, below, prompt + response, np.int32)
        tokens[-1] = TOKENS - 1
        found.append(ScoreRequest(prompt_tokens=tokens[:prompt], response_tokens=tokens[prompt:], **fields))
    return found


@pytest.mark.parametrize("below", [6, TOKENS], ids=["some tokens are free", "all tokens occur"])
def test_a_reward_models_score_is_read_at_the_last_token_whatever_that_is(case: Case, below: int) -> None:
    asked = requests([(3, 1), (2, 30), (9, 11), (1, 2), (30, 30), (32, 32)], below=below)
    found = case.rewarding.score(asked)
    assert all(scores.dtype == np.float32 and scores.shape == (1,) for scores in found)
    wanted = [score_of(case.reward_model, [*one.prompt_tokens, *one.response_tokens]) for one in asked]
    assert_same(np.concatenate(found), wanted)
    assert len(set(np.round(wanted, 4))) == len(asked)


def test_a_teacher_gives_the_logprob_of_each_token_at_the_sampling_temperature(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.rollout_workers.scorers.transformers_runtime._LOGITS_AT_A_TIME", 4 * TOKENS)
    for temperature in case.temperatures():
        asked = requests([(3, 1), (2, 30), (9, 11), (31, 32)], temperature=temperature)
        for one, found in zip(asked, case.teaching.score(asked), strict=True):
            wanted = forward_logprobs(
                case.teacher, one.prompt_tokens.tolist(), one.response_tokens.tolist(), temperature
            )
            assert found.dtype == np.float32
            assert_same(found, wanted.detach().numpy())


def test_a_teacher_names_the_likeliest_tokens_of_the_policys_vocabulary(case: Case) -> None:
    asked = requests([(3, 1), (2, 30), (9, 11)])
    asked = [msgspec.structs.replace(one, top_k=top_k) for one, top_k in zip(asked, (4, 4, 2), strict=True)]
    for one, found in zip(asked, case.teaching.score(asked), strict=True):
        logprobs, tokens, candidates = unpack_candidates(found, len(one.response_tokens), one.top_k)
        whole = torch.tensor([[*one.prompt_tokens, *one.response_tokens]])
        wanted_RV = case.teacher(whole).logits[0, len(one.prompt_tokens) - 1 : -1].log_softmax(-1).detach()
        best = wanted_RV[:, :POLICYS_TOKENS].topk(one.top_k)
        np.testing.assert_array_equal(tokens, best.indices.numpy())
        assert_same(candidates, best.values.numpy())
        own_R1 = wanted_RV.gather(1, torch.from_numpy(one.response_tokens).long()[:, None])
        assert_same(logprobs, own_R1[:, 0].numpy())


def test_a_request_gets_the_same_scores_whatever_is_asked_with_it(case: Case) -> None:
    """A group's samples share their prompt, whose cache a runtime may keep."""
    asked = requests([(20, 3), (20, 30), (20, 1)])
    asked = [msgspec.structs.replace(one, prompt_tokens=asked[0].prompt_tokens) for one in asked]
    for runner in (case.rewarding, case.teaching):
        together = runner.score(asked)
        for one, found in zip(asked, together, strict=True):
            assert_same(runner.score([one])[0], found)


def test_a_failed_batch_leaves_nothing_for_the_next(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests([(3, 1), (2, 30)])
    wanted = case.rewarding.score(asked)
    if case.engine.kind == "vllm":  # the others hold no requests
        engine = case.rewarding._engine._engine  # type: ignore[attr-defined]
        with monkeypatch.context() as patch:
            patch.setattr(engine.engine_core, "get_output", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                case.rewarding.score(asked)
        assert not engine.has_unfinished_requests()
    assert_same(case.rewarding.score(asked[::-1])[::-1], wanted)


def test_a_runtime_that_knows_one_temperature_refuses_others_with_the_remedy(case: Case) -> None:
    if not abilities_of(case.engine).any_temperature:
        with pytest.raises(ValueError, match=r"the request's is 0.7; set sampling.temperature=1, or scorers.engine"):
            case.teaching.score(requests([(3, 1)], temperature=0.7))


async def test_a_command_without_a_broker_scores_in_its_own_process(tmp_path: Path) -> None:
    model = save_model(tmp_path, scores=True)
    scorer = InProcessScorer(lambda: open_runner("reward_model", str(tmp_path), CONFIG, key=KEY))
    assert float((await scorer.score([1, 2], [3, 4]))[0]) == pytest.approx(score_of(model, [1, 2, 3, 4]), abs=1e-5)


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=VLLM)])
def test_models_that_are_none_are_refused_with_their_key(tmp_path: Path, kind: str) -> None:
    config = ScorersConfig(engine=ScorerEngineConfig(kind=kind))
    with pytest.raises(UnfitModelError, match=r"rewards\[0\].path: there is no directory /nowhere/model"):
        open_runner("reward_model", "/nowhere/model", config, key=KEY)
    save_model(tmp_path / "policy", scores=False)
    with pytest.raises(UnfitModelError, match=r"rewards\[0\].path: .* has no weights score.weight"):
        open_runner("reward_model", str(tmp_path / "policy"), config, key=KEY, most_tokens=MOST_TOKENS)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnfitModelError, match=r"teacher.path: .*empty cannot be loaded"):
        open_runner("teacher", str(tmp_path / "empty"), config, key="teacher.path")
    several = save_model(tmp_path / "several", scores=True)
    several.score = torch.nn.Linear(16, 3, bias=False)
    several.config.num_labels = 3
    several.save_pretrained(tmp_path / "several")
    with pytest.raises(UnfitModelError, match="has 3 labels; a reward model has one"):
        open_runner("reward_model", str(tmp_path / "several"), config, key=KEY)


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=VLLM)])
def test_a_classifier_of_an_encoder_is_refused_with_the_remedy(tmp_path: Path, kind: str) -> None:
    save_encoder(tmp_path / "encoder")
    save_model(tmp_path / "policy", scores=False)
    config = ScorersConfig(engine=ScorerEngineConfig(kind=kind))
    told = (
        r"rewards\[0\].path: .*encoder is a classifier of an encoder \(classifier\..*\).*A reward function of your own"
    )
    with pytest.raises(UnfitModelError, match=told):
        open_runner("reward_model", str(tmp_path / "encoder"), config, key=KEY, policy=tmp_path / "policy")


def test_a_model_of_another_tokenizer_is_refused_and_one_with_another_padding_token_is_not(tmp_path: Path) -> None:
    policy, same = tmp_path / "policy", tmp_path / "same"
    save_model(policy, scores=False)
    save_model(same, scores=True)
    settings = json.loads((same / "tokenizer_config.json").read_text())
    (same / "tokenizer_config.json").write_text(json.dumps({**settings, "pad_token": "0"}))
    open_runner("reward_model", str(same), CONFIG, key=KEY, policy=policy)
    save_model(tmp_path / "other", scores=True, alphabet="9876543210+-*=,#^")
    with pytest.raises(UnfitModelError, match=r"another tokenizer than the policy: '0' is token 0 of the policy and 9"):
        open_runner("reward_model", str(tmp_path / "other"), CONFIG, key=KEY, policy=policy)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_model_with_weights_that_are_no_numbers_is_refused_by_its_key(tmp_path: Path, number: float) -> None:
    save_model(tmp_path, scores=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["score.weight"][0, 1] = number
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnfitModelError, match=r"rewards\[0\]\.path: .* in score\.weight"):
        open_runner("reward_model", str(tmp_path), CONFIG, key=KEY)


def test_vllm_reserves_on_each_gpu_the_cache_of_what_a_scorer_is_asked_for(tmp_path: Path) -> None:
    text = save_model(tmp_path, scores=False).config
    asked = ScoringModel(kind="teacher", path=str(tmp_path), key=KEY)
    halves = ScorerEngineConfig(kind="vllm", options={"tensor_parallel_size": 2, "max_num_seqs": 7})
    whole, half = (
        arguments_of(asked, ScorersConfig(batch_tokens=100, engine=engine), text, MOST_TOKENS)
        for engine in (ScorerEngineConfig(kind="vllm"), halves)
    )
    numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
    assert whole["kv_cache_memory_bytes"] == 4 * numbers * (100 + MOST_TOKENS + 2 * BLOCK_TOKENS)
    assert half["kv_cache_memory_bytes"] == whole["kv_cache_memory_bytes"] // 2
    assert (whole["max_num_seqs"], half["max_num_seqs"]) == (SEQUENCES, 7)


def test_what_runtimes_state_is_known_without_torch() -> None:
    imported = "import sys, headway.rollout_workers.scorers.runtimes"
    program = f"{imported}; print({{'torch', 'vllm', 'transformers'}} & set(sys.modules))"
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert asked.stdout.strip() == "set()"
    assert not RUNTIMES["vllm"].abilities.takes_stored("worker_cls", "my.Worker")
    assert gpus_of(ScorerEngineConfig(kind="vllm", options={"tensor_parallel_size": 4})) == 4


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("vlm", r"scorers.engine.kind: there is no 'vlm'; did you mean 'vllm'\? Known: transformers, vllm"),
        ("torch.hub:load", r"scorers.engine.kind: 'torch.hub:load' is not imported"),
        ("tests.plugged:write", r"scorers.engine.kind: 'tests.plugged:write' makes a NoneType, which lacks longest"),
    ],
)
def test_what_is_no_runtime_is_named(tmp_path: Path, kind: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugged, "write", lambda asked, config: None)
    with pytest.raises(ConfigError, match=told):
        open_runner(
            "teacher",
            str(tmp_path),
            ScorersConfig(engine=ScorerEngineConfig(kind=kind)),
            key=KEY,
            roots=ImportRoots(("tests",)),
        )
