"""Stages train on the files of a public package, which are fetched when the test runs."""

import math
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from headway.learner.backends import open_backend
from headway.learner.config import ModelConfig, StageConfig
from headway.learner.data.prompts.rendering import Renderer
from headway.learner.data.records import Conversation, LabelledCompletion, Preference, open_records
from headway.learner.models.pretrained import load_tokenizer
from headway.learner.ranks import Ranks
from headway.learner.stages import open_stage
from headway.learner.stages.base import Progress, StageParts
from headway.learner.stages.stage_checkpoints import StageCheckpoints

from .tiny import OPTIMIZER

pytestmark = pytest.mark.slow

PACKAGE = "llamafactory"
VERSION = "0.9.5"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SHARED = {
    "held_out_records": 8,
    "max_tokens": 300,
    "too_long": "drop",
    "batch_size": 16,
    "max_steps": 3,
    "warmup_steps": 0,
    "schedule": "constant",
    "learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of LLaMA-Factory's example files, from its source archive."""
    directory = tmp_path_factory.mktemp("archive")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", PACKAGE, "-d", str(directory)]
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, timeout=240)
    if done.returncode:
        pytest.skip(f"the package index gives no {PACKAGE} {VERSION}: {done.stderr.strip().splitlines()[-1]}")
    with tarfile.open(directory / f"{PACKAGE}-{VERSION}.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    return directory / f"{PACKAGE}-{VERSION}" / "data"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Return a tiny model that has a token for every byte."""
    directory = tmp_path_factory.mktemp("model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config = AutoConfig.for_model(
        "qwen3", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes, **heads
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return ModelConfig(path=str(directory))


def trained(kind: str, source: dict[str, Any], model: ModelConfig, directory: Path, **options: Any) -> list[Progress]:
    """Run a stage to its end, and return its report on each step."""
    seen: list[Progress] = []
    backend: Any = open_backend("fsdp", model, OPTIMIZER, head="score" if kind == "reward_model" else "policy")
    ranks, tokenizer = Ranks.of(backend), load_tokenizer(model)
    parts = StageParts(
        backend=backend,
        ranks=ranks,
        tokenizer=tokenizer,
        renderer=Renderer(tokenizer),
        checkpoints=StageCheckpoints(backend, ranks, directory / kind, {"made": "of these files"}, every_s=60.0),
        seed=1,
        micro_batch_tokens=8192,
        gate=lambda tensors, prompts: 0.0,
        open_model=lambda _: backend,
        report=seen.append,
        should_stop=lambda: False,
    )
    stage = open_stage(StageConfig(kind=kind, options={**SHARED, "data": source, **options}), parts, "stages[0]")
    assert stage.run()
    return seen


def named(data: Path, name: str) -> dict[str, Any]:
    """Return the source of a set that the package's dataset_info.json describes."""
    return {"path": str(data), "options": {"dataset": name}}


def test_conversations_are_imitated(data: Path, model: ModelConfig, tmp_path: Path) -> None:
    assert len(open_records(Conversation, str(data), {"dataset": "alpaca_en_demo"}, "data")) == 999
    source = named(data, "alpaca_en_demo")
    seen = trained("sft", source, model, tmp_path, max_steps=8, learning_rate=3e-2, evaluate_every_steps=1)
    assert seen[-1].metrics["held_out/loss"] < seen[0].metrics["held_out/loss"] - 0.5


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_pairs_train_a_policy_and_a_reward_model(kind: str, data: Path, model: ModelConfig, tmp_path: Path) -> None:
    assert len(open_records(Preference, str(data), {"dataset": "dpo_en_demo"}, "data")) == 300
    seen = trained(kind, named(data, "dpo_en_demo"), model, tmp_path, max_tokens=700)
    assert seen[0].loss == pytest.approx(math.log(2), abs=1e-3 if kind == "dpo" else 0.5)
    assert 0 < seen[-1].metrics["held_out/loss"] < 3
    assert all(one.metrics["grad_norm"] > 0 for one in seen)


def test_judged_responses_train_a_policy(data: Path, model: ModelConfig, tmp_path: Path) -> None:
    assert len(open_records(LabelledCompletion, str(data), {"dataset": "kto_en_demo"}, "data")) == 300
    seen = trained("kto", named(data, "kto_en_demo"), model, tmp_path, too_long="cut_end")
    assert seen[0].loss == pytest.approx(0.5, abs=1e-3)
    assert all(one.metrics["grad_norm"] > 0 for one in seen)
