"""Reward models learn from pairs, leave files that other programs read, and score as transformers does."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headway.algorithms.preferences import bradley_terry
from headway.broker.errors import ConfigError
from headway.learner.backends import open_backend
from headway.learner.backends.base import ScoreBackend
from headway.learner.batching.packing import concatenate, labelled
from headway.learner.config import ModelConfig, RecordsConfig
from headway.learner.data.records.loading import open_pairs
from headway.learner.models.model_files import check_classifier
from headway.learner.models.pretrained import load_tokenizer
from headway.learner.stages.base import Progress
from headway.learner.stages.record_stage import RecordOrder
from headway.learner.stages.reward_model import completed, with_state_behind

from .preferences import MODEL, arithmetic, opened_scores
from .scoring import STOP, by_transformers, responses, scores
from .tiny import OPTIMIZER, model_config

ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen3_moe"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("has_own_padding", [True, False])
def test_transformers_gives_the_scores_of_the_backend(architecture: str, has_own_padding: bool, tmp_path: Path) -> None:
    model = model_config(architecture)
    if not has_own_padding:  # a tokenizer that pads with its stop token has to get another one
        open_backend("fsdp", model, OPTIMIZER, seed=1).save(tmp_path / "policy")
        settings = json.loads((tmp_path / "policy" / "tokenizer_config.json").read_text())
        settings |= {"pad_token": None, "unk_token": "<pad>"}
        (tmp_path / "policy" / "tokenizer_config.json").write_text(json.dumps(settings))
        model = ModelConfig(path=str(tmp_path / "policy"), dtype="float32")
    backend = open_backend("fsdp", model, OPTIMIZER, seed=3, head="score")
    row = concatenate([with_state_behind(tokens) for tokens in responses(5, 9)])
    backend.step([row], lambda _, values_T: (-(values_T * row.loss_mask_T).sum(), {}), 1e-2)
    backend.save(tmp_path / "left")
    texts = responses(9, 14, 6)
    expected = scores(backend, texts)
    assert expected.std() > 0.01
    torch.testing.assert_close(by_transformers(tmp_path / "left", texts), expected, rtol=0, atol=1e-4)
    again = open_backend("fsdp", ModelConfig(path=str(tmp_path / "left")), OPTIMIZER, seed=8, head="score")
    torch.testing.assert_close(scores(again, texts), expected, rtol=0, atol=1e-6)


def test_it_learns_to_tell_right_answers_from_wrong_ones(tmp_path: Path) -> None:
    seen: list[Progress] = []
    sources = {"data": arithmetic(2000, 1), "held_out": arithmetic(300, 1, split="held_out")}
    trained, held_out = (
        {pair.prompt for pair in open_pairs(msgspec.convert(source, RecordsConfig), 1, name)}
        for name, source in sources.items()
    )
    assert held_out
    assert not held_out & trained
    options: dict[str, Any] = {
        **sources,
        "held_out_records": 0,
        "batch_size": 64,
        "epochs": 3,
        "learning_rate": 1e-2,
        "evaluate_every_steps": 40,
        "keep": "best",
        "best": {"metric": "held_out/score_accuracy", "mode": "max"},
    }
    stage, backend = opened_scores(tmp_path, options=options, micro_batch_tokens=4096, report=seen.append)
    assert stage.run()
    measured = seen[-1].metrics
    assert measured["held_out/score_accuracy"] > 0.9
    assert measured["held_out/score_margin"] == pytest.approx(
        measured["held_out/score_chosen"] - measured["held_out/score_rejected"], rel=1e-4
    )
    texts = responses(9, 14, 6)
    directory = stage.save()
    torch.testing.assert_close(by_transformers(directory, texts), scores(_scores_of(backend), texts), rtol=0, atol=1e-4)


def _scores_of(backend: Any) -> ScoreBackend:
    found: ScoreBackend = backend
    return found


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "pair": [{"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 2.0}],
    "ranked": [{"prompt": "1+1=", "responses": ["2", "3", "4"]}],
    "scored": [{"query": "1+1=", "response": ["3", "2", "4"], "score": [0.5, 1.5, 0.0]}],
}
GAPS = {"pair": [("2", "3", 2.0)], "ranked": [("2", "3", 0.0), ("2", "4", 0.0), ("3", "4", 0.0)]}
GAPS["scored"] = [("2", "3", 1.0), ("2", "4", 1.5), ("3", "4", 0.5)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("margins", [True, False])
def test_the_first_loss_is_that_of_all_pairs_with_their_margins(layout: str, margins: bool, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in LAYOUTS[layout]))
    seen: list[Progress] = []
    options = {"data": {"path": str(tmp_path / "rows.jsonl")}, "held_out_records": 0, "margins": margins}
    stage, backend = opened_scores(tmp_path, options=options, report=seen.append)
    tokenizer = load_tokenizer(MODEL)
    rows = [[*tokenizer(f"1+1={text}").input_ids, STOP] for pair in GAPS[layout] for text in pair[:2]]
    texts = [np.asarray(tokens, np.int32) for tokens in rows]
    margin_P = torch.tensor([gap * margins for *_, gap in GAPS[layout]])
    expected, _ = bradley_terry(scores(_scores_of(backend), texts), margin=margin_P, centering=0.01)
    chosen = RecordOrder([1] * len(expected), batch_size=3, epochs=1, max_steps=0, seed=1).batch(0)
    assert stage.run()
    assert seen[0].loss == pytest.approx(expected[chosen].mean().item(), abs=1e-5)


def test_a_score_stands_at_the_stop_token_and_nothing_after_it_counts() -> None:
    tokenizer = load_tokenizer(MODEL)
    tokens = np.array([1, 2, 3, STOP, 7], np.int32)
    (sequence,) = completed([labelled(tokens, np.array([0, 0, 1, 1, 0], np.uint8))], "a.jsonl:1", tokenizer)
    assert sequence.token_ids[:4].tolist() == [1, 2, 3, STOP]
    assert (sequence.prompt_length, sequence.loss_mask.tolist()) == (4, [1])
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: a response ends with the token '3' instead of .*'<eos>'"):
        completed([labelled(tokens[:3] + 0, np.array([0, 1, 1], np.uint8))], "a.jsonl:1", tokenizer)


def test_a_model_that_cannot_be_left_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="transformers has no sequence classifier of the type cohere"):
        check_classifier(model_config("cohere"))
    backend = open_backend("fsdp", MODEL, OPTIMIZER, seed=3, head="score")
    backend.save(tmp_path / "reward model")
    with pytest.raises(ConfigError, match="is a reward model, which scores text and writes none"):
        open_backend("fsdp", ModelConfig(path=str(tmp_path / "reward model")), OPTIMIZER)
