"""The models of scorers against a plain transformers forward of one response at a time."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from broker.schema import ScoreRequest
from rollout_workers.config import ScorersConfig
from rollout_workers.scorers.base import UnfitModelError
from rollout_workers.scorers.candidates import parted
from rollout_workers.scorers.models import open_runner
from rollout_workers.scorers.own import OwnScorer

from .models import forward_logprobs
from .reward_models import TOKENS, save_model, score_of

CONFIG = ScorersConfig()
KEY = "rewards[0].path"


def requests(lengths: Sequence[tuple[int, int]], *, below: int = TOKENS) -> list[ScoreRequest]:
    """Responses that end with the highest token, which is both stop and padding token."""
    rng = np.random.default_rng(0)
    found = []
    for prompt, response in lengths:
        tokens = rng.integers(0, below, prompt + response, np.int32)
        tokens[-1] = TOKENS - 1
        found.append(ScoreRequest(prompt_tokens=tokens[:prompt], response_tokens=tokens[prompt:], temperature=0.7))
    return found


@pytest.mark.parametrize("below", [6, TOKENS], ids=["some tokens are free", "all tokens occur"])
def test_a_reward_models_score_is_read_at_the_last_token_whatever_that_is(tmp_path: Path, below: int) -> None:
    model = save_model(tmp_path, scores=True)
    runner = open_runner("reward_model", str(tmp_path), CONFIG, key=KEY)
    asked = requests([(3, 1), (2, 30), (9, 11), (1, 2), (30, 30)], below=below)
    found = runner.score(asked)
    assert all(scores.dtype == np.float32 and scores.shape == (1,) for scores in found)
    wanted = [score_of(model, [*one.prompt_tokens, *one.response_tokens]) for one in asked]
    np.testing.assert_allclose(np.concatenate(found), wanted, rtol=1e-4, atol=1e-5)
    assert len(set(np.round(wanted, 4))) == len(asked)


def test_a_teacher_gives_the_logprob_of_each_token_at_the_sampling_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path, scores=False)
    monkeypatch.setattr("rollout_workers.scorers.models.teacher._LOGITS_AT_A_TIME", 4 * TOKENS)
    runner = open_runner("teacher", str(tmp_path), CONFIG, key="teacher.path")
    asked = requests([(3, 1), (2, 30), (9, 11)])
    for one, found in zip(asked, runner.score(asked), strict=True):
        wanted = forward_logprobs(model, one.prompt_tokens.tolist(), one.response_tokens.tolist(), 0.7)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy_tokens", [TOKENS, TOKENS - 9], ids=["all", "of a padded teacher"])
def test_a_teacher_names_the_likeliest_tokens_of_the_policys_vocabulary(tmp_path: Path, policy_tokens: int) -> None:
    model, policy = save_model(tmp_path / "teacher", scores=False), tmp_path / "policy"
    save_model(policy, scores=False)
    settings = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps({**settings, "vocab_size": policy_tokens}))
    runner = open_runner("teacher", str(tmp_path / "teacher"), CONFIG, key="teacher.path", policy=policy)
    asked = [msgspec.structs.replace(one, top_k=4) for one in requests([(3, 1), (2, 30), (9, 11)])]
    for one, found in zip(asked, runner.score(asked), strict=True):
        logprobs, tokens, candidates = parted(found, len(one.response_tokens), 4)
        whole = torch.tensor([[*one.prompt_tokens, *one.response_tokens]])
        wanted_RV = (model(whole).logits[0, len(one.prompt_tokens) - 1 : -1] / 0.7).log_softmax(-1).detach()
        best = wanted_RV[:, :policy_tokens].topk(4)
        np.testing.assert_array_equal(tokens, best.indices.numpy())
        np.testing.assert_allclose(candidates, best.values.numpy(), rtol=1e-4, atol=1e-5)
        own_R1 = wanted_RV.gather(1, torch.from_numpy(one.response_tokens).long()[:, None])
        np.testing.assert_allclose(logprobs, own_R1[:, 0].numpy(), rtol=1e-4, atol=1e-5)


async def test_a_command_without_a_broker_scores_in_its_own_process(tmp_path: Path) -> None:
    model = save_model(tmp_path, scores=True)
    scorer = OwnScorer(lambda: open_runner("reward_model", str(tmp_path), CONFIG, key=KEY))
    assert float((await scorer.score([1, 2], [3, 4]))[0]) == pytest.approx(score_of(model, [1, 2, 3, 4]), abs=1e-5)


def test_models_that_are_none_are_refused_with_their_key(tmp_path: Path) -> None:
    with pytest.raises(UnfitModelError, match=r"rewards\[0\].path: there is no directory /nowhere/model"):
        open_runner("reward_model", "/nowhere/model", CONFIG, key=KEY)
    save_model(tmp_path / "policy", scores=False)
    with pytest.raises(UnfitModelError, match=r"rewards\[0\].path: .* has no weights score.weight"):
        open_runner("reward_model", str(tmp_path / "policy"), CONFIG, key=KEY)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnfitModelError, match=r"teacher.path: .*empty cannot be loaded"):
        open_runner("teacher", str(tmp_path / "empty"), CONFIG, key="teacher.path")
    several = save_model(tmp_path / "several", scores=True)
    several.score = torch.nn.Linear(16, 3, bias=False)
    several.config.num_labels = 3
    several.save_pretrained(tmp_path / "several")
    with pytest.raises(UnfitModelError, match="has 3 labels; a reward model has one"):
        open_runner("reward_model", str(tmp_path / "several"), CONFIG, key=KEY)


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
