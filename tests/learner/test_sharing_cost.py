"""`learner.prefix_sharing: auto` takes the plan that was measured to be the quicker one, on a GPU and on a CPU.

The measurements were made on an H100 and on a CPU core.
"""

from dataclasses import replace

import pytest
from transformers import Qwen3Config

from benchmarks.models import SHAPES
from benchmarks.throughput import samples
from headway.learner.batching.clusters import PrefixSharing, clusters_of
from headway.learner.batching.cost import CostModel
from headway.learner.batching.tree import TreeSize
from headway.learner.models.shape import ModelShape, shape_of

SMOLLM2 = shape_of(Qwen3Config(**SHAPES["smollm2-135m"].config()))
SETTINGS: tuple[PrefixSharing, ...] = ("auto", "always", "never")
TINY = shape_of(
    Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=20,
    )
)


def shares(
    shape: ModelShape,
    device: str,
    *,
    count: int,
    budget: int,
    prompt: int,
    response: int,
    setting: PrefixSharing = "auto",
    is_replayed: bool = False,
) -> bool:
    """Return whether a step of groups of eight samples is planned with shared tokens."""
    units = [[one] for one in samples(count, 8, prompt, response, shape.vocabulary)]
    cost = CostModel.of_model(shape, device, is_replayed=is_replayed)
    clusters, _ = clusters_of(units, 1, budget, cost, setting)
    return any(cluster.is_shared for cluster in clusters)


@pytest.mark.parametrize(
    ("count", "budget", "prompt", "response", "is_quicker"),
    [
        (128, 4096, 64, 50, True),  # 508 ms against 550: three rows in the place of four
        (128, 16384, 64, 50, False),  # 199 ms against 155: one row either way, which the process launches
        (512, 16384, 64, 50, True),  # 382 against 517
        (512, 65536, 64, 50, True),  # 218 against 308
        (128, 65536, 64, 256, False),  # 0.52 s against 0.44: a sixth of the tokens is not worth the copies
        (128, 65536, 1024, 256, True),  # 0.53 s against 1.32
        (64, 65536, 8192, 256, True),  # 1.23 s against 6.02
    ],
)
def test_auto_shares_on_a_gpu_where_that_was_quicker(
    count: int, budget: int, prompt: int, response: int, is_quicker: bool
) -> None:
    found = [
        shares(SMOLLM2, "cuda", count=count, budget=budget, prompt=prompt, response=response, setting=setting)
        for setting in SETTINGS
    ]
    assert found == [is_quicker, True, False]


def test_a_short_row_shares_where_its_kernels_are_replayed() -> None:
    """48.6 ms against 77.2: nothing is launched."""
    assert shares(SMOLLM2, "cuda", count=128, budget=16384, prompt=64, response=50, is_replayed=True)


def test_a_larger_model_shares_a_short_row_too() -> None:
    """Its row takes the device longer than the launches."""
    shape = shape_of(Qwen3Config(**SHAPES["qwen3-8b"].config()))
    assert shares(shape, "cuda", count=128, budget=16384, prompt=64, response=50)


@pytest.mark.parametrize(
    ("count", "prompt", "response", "is_quicker"),
    [
        (8, 8, 10, False),  # 13.5 ms either way: a row of 146 tokens
        (256, 8, 10, True),  # 77 against 99
        (64, 200, 30, True),  # 249 against 407
        (64, 8, 200, False),
    ],
)
def test_auto_shares_on_a_cpu_where_that_was_quicker(count: int, prompt: int, response: int, is_quicker: bool) -> None:
    assert shares(TINY, "cpu", count=count, budget=16384, prompt=prompt, response=response) is is_quicker


def test_a_row_costs_at_least_its_launches() -> None:
    cost = CostModel(per_token=2.0, per_pair=0.0, per_micro_batch=5.0, least=100.0, least_of_tree=110.0, per_tree=3.0)
    assert cost.of_micro_batch([10, 20]) == 105.0
    assert cost.of_micro_batch([100]) == 205.0
    assert cost.of_row(60.0, is_tree=True) == 118.0
    assert cost.of_row(200.0, is_tree=True) == 208.0


def test_a_tree_costs_its_copies_and_repeated_queries() -> None:
    size, cost = (
        TreeSize(positions=10, path_tokens=30, pairs=70.0, path_pairs=300.0),
        CostModel(per_token=1.0, per_pair=1.0),
    )
    assert cost.of_tree(size) == 80.0
    assert replace(cost, per_copy=2.0).of_tree(size) == 140.0
    assert replace(cost, repeats_queries=True).of_tree(size) == 310.0
