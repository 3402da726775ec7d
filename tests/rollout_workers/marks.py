import pytest

VLLM = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn of its own dependencies
]
