# mypy: disable-error-code="arg-type, index, misc"
"""vLLM's layers with adapters, below the engine."""

import pytest
import torch
from torch import nn

from headway.broker.errors import HeadwayError

from .marks import VLLM
from .models import make_model

pytestmark = VLLM


def test_a_loader_that_sees_no_base_of_a_wrapped_layer_finds_its_weights() -> None:
    """vLLM's own loader, and a wrapper that cannot load, as those of vLLM 0.26 are."""
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.model_executor.models.utils import AutoWeightsLoader

    from headway.rollout_workers.engines.vllm.lora_buffers import unwrapped

    class Wrapper(BaseLayerWithLoRA):
        load_weights = None

        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.base_layer = layer

    layer = nn.Linear(2, 3)
    model = nn.Sequential(nn.Sequential(Wrapper(layer)), nn.Linear(3, 1))
    wrapper, weights = model[0][0], {"0.0.weight": torch.ones(3, 2), "1.bias": torch.ones(1)}
    with pytest.raises(ValueError, match="no module or parameter named"):
        AutoWeightsLoader(model).load_weights(weights.items())
    with unwrapped(model):
        assert AutoWeightsLoader(model).load_weights(weights.items()) == {*weights}
    assert torch.equal(layer.weight, torch.ones(3, 2))
    assert model[0][0] is wrapper
    with pytest.raises(KeyError), unwrapped(model):
        raise KeyError
    assert model[0][0] is wrapper


def test_a_gpu_takes_no_adapters_of_a_model_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    from headway.rollout_workers.engines.vllm.lora_buffers import adapter_arguments

    shapes = make_model("dense", 0)
    assert adapter_arguments(16, 1, shapes, "float32")["max_lora_rank"] == 16
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda platform: False)
    assert adapter_arguments(17, 2, shapes, "bfloat16")["max_lora_rank"] == 32
    assert adapter_arguments(0, 1, shapes, "float32") == {}
    with pytest.raises(HeadwayError, match=r"engine\.dtype=bfloat16, or weights\.adapter=merged"):
        adapter_arguments(16, 1, shapes, "float32")
