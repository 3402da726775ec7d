"""Marks of tests that need an engine's package."""

import importlib.util
from typing import Any

import pytest

VLLM = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn of its own dependencies
]

SGLANG = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # a start of its processes takes minutes on a busy machine
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed: make test-sglang"),
]


def needs_sglang(test: Any) -> Any:
    """Mark one test of a file whose other tests need no SGLang."""
    for mark in SGLANG:
        test = mark(test)
    return test


def needs_vllm(test: Any) -> Any:
    """Mark one test of a file whose other tests need no vLLM."""
    for mark in VLLM:
        test = mark(test)
    return test
