"""An engine saves everything that the next version does not bring before a sleep that discards its memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines.vllm.open_vllm import BETWEEN_MIXED, engine_arguments, spaced_sizes
from headway.rollout_workers.engines.weight_loading.direct_loading import SleepBackup, gaps


def test_gaps_are_the_rows_between_runs() -> None:
    assert list(gaps([(2, 4), (0, 1), (4, 6)], 8)) == [(1, 2), (6, 8)]
    assert list(gaps([(0, 3), (1, 2), (3, 5)], 5)) == []
    assert list(gaps([], 2)) == [(0, 2)]


def test_a_version_and_what_was_kept_are_everything_there_was() -> None:
    padded, scale = torch.randn(6, 3), torch.randn(())
    table = torch.randn(4, 5)
    parameters = {"padded": padded, "scale": scale}
    derived = {"table": table, "row": table[1].expand(2, 5), "alias": padded[:2]}
    before = [tensor.clone() for tensor in (padded, scale, table)]
    kept = SleepBackup(derived, parameters, {"padded": [(0, 2), (2, 4)]})
    assert kept.nbytes == 4 * (2 * 3 + 1 + 4 * 5)  # an alias of a parameter is loaded with it
    for tensor in (padded, scale, table):
        tensor.fill_(float("nan"))
    kept.restore()
    padded[:4] = before[0][:4]  # the version
    for tensor, expected in zip((padded, scale, table), before, strict=True):
        assert torch.equal(tensor, expected)


def test_what_a_loader_of_its_own_fills_is_not_kept() -> None:
    parameters = {"weight": torch.randn(4, 4)}
    assert SleepBackup({}, parameters, None).nbytes == 0
    assert (
        SleepBackup({}, parameters, {}).nbytes == 4 * 4 * 4
    )  # before the first version the rows that one fills are unknown


@pytest.mark.parametrize(("has_gpu", "sleeps"), [(True, True), (True, False), (False, True)])
def test_vllm_is_told_from_the_start_that_it_will_sleep(
    has_gpu: bool, sleeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    arguments = engine_arguments(EngineConfig(kind="vllm"), tmp_path, "Qwen3ForCausalLM", 0, sleeps=sleeps)
    assert arguments.get("enable_sleep_mode") == (sleeps if has_gpu else None)


@pytest.mark.parametrize(
    ("requests", "options", "largest"),
    [
        (256, {}, None),
        (511, {}, None),
        (600, {}, 608),
        (4096, {}, 1024),
        (600, {"cudagraph_capture_sizes": [64]}, None),
    ],
)
def test_vllm_has_graphs_for_as_many_requests_as_it_gets(
    requests: int, options: dict[str, Any], largest: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = EngineConfig(kind="vllm", max_concurrent=requests, options=options)
    arguments = engine_arguments(config, tmp_path, "Qwen3ForCausalLM", 0)
    assert arguments.get("max_cudagraph_capture_size") == largest


@pytest.mark.parametrize("full", [1, 5, 8, 9, 33, 41, 100, 256, 511])
def test_batches_are_padded_by_little(full: int) -> None:
    most = min(512, 2 * (full + 1))
    sizes = spaced_sizes(full, most)
    assert full in sizes
    for tokens in range(1, most + 1):
        padded = next(size for size in sizes if size >= tokens) - tokens
        assert padded < (max(8, 3 * tokens / 8) if tokens < full else BETWEEN_MIXED)


@pytest.mark.parametrize(
    ("requests", "options", "sizes"),
    [
        (256, {}, [1, 2, 4, 8, 16, 24, 32, 40, 56, 72, 96, 120, 152, 192, 240, 256, *range(288, 513, 32)]),
        (6, {}, [1, 2, 4, 6, 16]),
        (
            4096,
            {},
            [1, 2, 4, 8, 16, 24, 32, 40, 56, 72, 96, 120, 152, 192, 240, 304, 384, 480, 600, 752, 944, 1024],
        ),
        (256, {"max_cudagraph_capture_size": 64}, None),
    ],
)
def test_vllm_records_fewer_graphs_of_a_model_with_adapters(
    requests: int, options: dict[str, Any], sizes: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = EngineConfig(kind="vllm", max_concurrent=requests, options=options)
    arguments = engine_arguments(config, tmp_path, "Qwen3ForCausalLM", 0, has_adapters=True)
    assert arguments.get("cudagraph_capture_sizes") == sizes
    assert arguments.get("max_cudagraph_capture_size") == options.get("max_cudagraph_capture_size")
