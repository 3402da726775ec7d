from itertools import combinations

import pytest

from headway.learner.config import LayoutConfig

from .layouts import covering, described, layouts, pairs, replicas

LAYERS, EXPERTS = 4, 8


@pytest.mark.parametrize(
    ("backend", "experts", "processes", "count"),
    [("megatron", 0, 1, 1), ("megatron", 0, 2, 5), ("megatron", EXPERTS, 2, 11), ("fsdp", EXPERTS, 4, 3)],
)
def test_all_layouts_are_found_once(backend: str, experts: int, processes: int, count: int) -> None:
    found = layouts(backend, processes, layers=LAYERS, experts=experts)
    assert len(found) == count
    assert len({described(layout, processes) for layout in found}) == count


def test_layouts_of_two_processes_are_these() -> None:
    found = layouts("megatron", 2, layers=LAYERS, experts=0)
    names = ["replicas2", "pipeline2", "pipeline2-virtual_pipeline2", "tensor2", "context2"]
    assert sorted(described(layout, 2) for layout in found) == sorted(names)


def test_experts_that_do_not_divide_stay_together() -> None:
    assert max(layout.expert for layout in layouts("megatron", 4, layers=LAYERS, experts=6)) == 2


def test_few_layouts_cover_every_pair() -> None:
    every = layouts("megatron", 4, layers=LAYERS, experts=EXPERTS)
    chosen = covering(every, 4)
    assert len(chosen) <= 8 < len(every)
    assert {feature for layout in chosen for feature in pairs(layout, 4)} == set(
        combinations([*LayoutConfig.__struct_fields__, "replicas"], 2)
    )


def test_replicas_are_what_is_left() -> None:
    assert replicas(LayoutConfig(tensor=2, expert=4), 4) == 2
    assert described(LayoutConfig(), 1) == "whole"
