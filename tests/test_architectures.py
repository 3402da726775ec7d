"""Some of what `python -m benchmarks.architectures` does for all: an architecture trains with engine and learner in
agreement, or is refused by name before a process starts. No other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import architectures
from headway.broker.errors import ConfigError
from headway.learner.backends import open_backend
from headway.learner.backends.fsdp.policy import Policy, prepare_layers
from headway.learner.batching.packing import concatenate
from headway.learner.config import ComputeConfig, OptimizerConfig
from headway.learner.models.architectures import UNSERVED, UNTRAINED, check_architecture
from headway.learner.models.attention import UnsupportedModelError
from headway.learner.models.pretrained import load_model
from tests.learner.tiny import sequences

TRAINS = ["gpt_neox", "mixtral", "stablelm", "nemotron", "deepseek_v3", "biogpt"]
"""A head of another name, experts of other names, attention to which layers hand nothing on (twice), keys and values of
different widths, layers that the model does not name."""


@pytest.mark.parametrize("name", TRAINS)
def test_an_architecture_trains_with_engine_and_learner_in_agreement(name: str) -> None:
    found = architectures.measured({"architecture": name, "engine": "embedded"})
    assert found["outcome"] == "trains"
    assert found["tokens"] == len(architectures.PROMPTS) * architectures.NEW_TOKENS


@pytest.mark.parametrize("name", ["bloom", "falcon", "bert", "gptj", "gemma2", "mamba"])
def test_an_architecture_that_would_train_wrongly_is_refused_by_name(name: str) -> None:
    found = architectures.measured({"architecture": name, "engine": "embedded"})
    assert found["outcome"] == "refused"
    assert name in found["words"]


def test_a_type_is_refused_for_one_reason() -> None:
    assert not UNTRAINED.keys() & UNSERVED.keys()
    for name in TRAINS:
        check_architecture({"model_type": name}, "fsdp", "embedded")
        with pytest.raises(ConfigError, match=name):
            check_architecture({"model_type": name}, "megatron", "vllm")


@pytest.mark.parametrize("name", ["bloom", "cpmant", "gpt_neox_japanese", "llama4_text"])
@pytest.mark.parametrize("head", ["policy", "value"])
def test_a_layer_that_never_asks_for_our_attention_ends_the_first_pass(name: str, head: Any, tmp_path: Path) -> None:
    """A type of which nothing is known gets as far as this; "llama4_text" hides its layers from the learner."""
    backend: Any = open_backend("fsdp", architectures.write(name, tmp_path), OptimizerConfig(), head=head)
    row = concatenate(sequences([5, 7]))
    with pytest.raises(UnsupportedModelError, match=name):
        backend.logprobs([row], 1.0) if head == "policy" else backend.values([row])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler, which looks at gradients
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["qwen3", "stablelm"])
def test_layers_that_are_compiled_are_counted_and_compute_the_same(name: str, recompute: Any, tmp_path: Path) -> None:
    """Compiled code of one layer, which all others use, would not say which of them asked."""
    model = architectures.write(name, tmp_path)
    plain, compiled = (Policy(load_model(model), on_cpu=True, half_precision=False) for _ in range(2))
    prepare_layers(compiled.layers, ComputeConfig(recompute=recompute))
    for layer in compiled.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend="eager")
    for lengths in ([7, 12, 5], [9, 4, 6], [3, 8]):
        row = concatenate(sequences(lengths))
        expected, found = plain(row, 1.0), compiled(row, 1.0)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        expected.sum().backward()
        found.sum().backward()
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=0, atol=1e-4)
