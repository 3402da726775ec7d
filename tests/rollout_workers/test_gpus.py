"""Each worker gets GPUs of its own, as CUDA_VISIBLE_DEVICES."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headway.broker.errors import ConfigError
from headway.rollout_workers.config import EngineConfig
from headway.rollout_workers.engines import start_lock, visible_devices
from headway.rollout_workers.engines.sglang.open_sglang import named_gpus
from headway.rollout_workers.engines.vllm.open_vllm import measured_gpus


def vllm(**options: object) -> EngineConfig:
    return EngineConfig(kind="vllm", options=options)


@pytest.mark.parametrize(
    ("devices", "engine", "expected"),
    [
        ((), vllm(tensor_parallel_size=2), []),
        ((1, 2, 3), vllm(), ["1", "2", "3"]),
        ((4, 5, 6, 7), vllm(tensor_parallel_size=2), ["4,5", "6,7"]),
        ((0, 1, 2, 3), vllm(tensor_parallel_size=2, pipeline_parallel_size=2), ["0,1,2,3"]),
        (("2,3", "0,1"), vllm(tensor_parallel_size=2), ["2,3", "0,1"]),
        ((1, "2,3"), EngineConfig(kind="my.engine:Engine", options={"tensor_parallel_size": 7}), ["1", "2,3"]),
        (("GPU-a", "GPU-b"), vllm(pipeline_parallel_size=2), ["GPU-a,GPU-b"]),
    ],
)
def test_consecutive_gpus_go_to_one_worker(
    devices: tuple[int | str, ...], engine: EngineConfig, expected: list[str]
) -> None:
    assert visible_devices(devices, engine) == expected


@pytest.mark.parametrize(
    ("devices", "engine", "complaint"),
    [
        ((1, 2, 3), vllm(tensor_parallel_size=2), r"names 3 GPUs, and each worker's engine takes 2.*a multiple of 2"),
        (("0,1", 2), vllm(tensor_parallel_size=2), r"gives '2' to one worker, whose engine takes 2"),
        ((0,), vllm(tensor_parallel_size="two"), r"engine\.options\.tensor_parallel_size is 'two'"),
        ((0,), vllm(pipeline_parallel_size=0), r"engine\.options\.pipeline_parallel_size is 0"),
    ],
)
def test_what_does_not_come_out_even_is_refused(
    devices: tuple[int | str, ...], engine: EngineConfig, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        visible_devices(devices, engine)


def test_engines_start_on_a_gpu_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first engine is killed while it starts, and the second has waited for it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = f"""
import tempfile, time
from headway.rollout_workers.engines import start_lock
tempfile.tempdir = {str(tmp_path)!r}
with start_lock(["b", "a"]):
    print("starting", flush=True)
    time.sleep(600)
"""
    order: list[str] = []

    def start(name: str, gpu: str) -> None:
        with start_lock([gpu]):
            order.append(name)

    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "starting\n"
        start("elsewhere", "c")
        second = threading.Thread(target=start, args=("second", "a"))
        second.start()
        second.join(0.2)
        order.append("killed")
        first.kill()
    second.join(240)
    assert order == ["elsewhere", "killed", "second"]


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_engines_that_are_told_their_cache_start_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", Cuda())
    assert measured_gpus({}, 2) == ["GPU-0", "GPU-1"]
    assert measured_gpus({"kv_cache_memory_bytes": 1 << 30}, 2) == []


class Cuda:
    """vLLM's platform, as far as the code asks it."""

    def is_cuda(self) -> bool:
        return True

    def get_device_uuid(self, number: int) -> str:
        return f"GPU-{number}"


def test_sglang_waits_for_engines_on_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert named_gpus(2) == ["sglang-4", "sglang-5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert named_gpus(2) == ["sglang-0", "sglang-1"]
