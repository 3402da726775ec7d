"""Properties that a CPU cannot show: fingerprints by the kernel, buckets on a GPU, copies of them."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.gpus import gpu_names
from headway.weightsync.tensors.buckets import fingerprints
from headway.weightsync.tensors.fingerprint import MatrixParts, fingerprint, fingerprint_parts
from headway.weightsync.tensors.shared_memory import gpu_handle
from headway.weightsync.tensors.staging import Staging, stage
from headway.weightsync.transports.http_pull import ServedVersion

from .conftest import ON_GPUS
from .test_buckets import awkward_tensors

pytestmark = ON_GPUS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (1000, 129), (3, 5000), (5, 1024)])
def test_the_kernel_adds_up_what_the_cpu_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tensor = (100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert fingerprint(tensor.cuda()) == fingerprint(tensor)
    rows = [(0, shape[0] // 2, 5, 2, 3), (shape[0] // 2, shape[0], 0, shape[1], 1)]
    on_gpu = fingerprint_parts([tensor.cuda()], MatrixParts.of(rows, torch.device("cuda")))
    assert on_gpu.tolist() == fingerprint_parts([tensor], MatrixParts.of(rows, torch.device("cpu"))).tolist()


def test_rows_of_several_matrices_are_numbered_through() -> None:
    seeds = torch.Generator().manual_seed(0)
    shapes = ((3, 7), (5, 3000), (1, 1), (129, 33))
    matrices = [(100 * torch.randn(shape, generator=seeds)).bfloat16() for shape in shapes]
    rows = [(0, 2, 0, 7, 1), (2, 8, 5, 2, 3), (8, 9, 0, 1, 1), (20, 138, 7, 33, 1)]
    on_gpu, on_cpu = (
        fingerprint_parts([matrix.to(device) for matrix in matrices], MatrixParts.of(rows, torch.device(device)))
        for device in ("cuda", "cpu")
    )
    assert on_gpu.tolist() == on_cpu.tolist()


def test_buckets_on_a_gpu_hold_the_same_bits() -> None:
    on_gpu, on_cpu = (stage(awkward_tensors(), 4096, device) for device in ("cuda", "cpu"))
    assert (on_gpu.tensors, on_gpu.fingerprints) == (on_cpu.tensors, on_cpu.fingerprints)
    back = on_gpu.on_cpu()
    assert fingerprints(back.tensors, dict(enumerate(back.buckets))) == dict(enumerate(on_cpu.fingerprints))


def test_tensors_of_a_gpu_in_buckets_of_host_memory_have_the_same_fingerprints() -> None:
    there = ((name, tensor.cuda()) for name, tensor in awkward_tensors())
    from_gpu, on_cpu = stage(there, 4096), stage(awkward_tensors(), 4096)
    assert (from_gpu.tensors, from_gpu.fingerprints) == (on_cpu.tensors, on_cpu.fingerprints)
    assert all(map(torch.equal, from_gpu.buckets, on_cpu.buckets))


def test_what_is_read_of_a_version_on_a_gpu_outlives_its_memory() -> None:
    buckets = tuple(torch.full((1 << 20,), number, dtype=torch.uint8, device="cuda") for number in range(3))
    served = ServedVersion(buckets, memory_is_reused=True)
    assert [bytes(served.read(index) or b"")[:1] for index in range(3)] == [b"\0", b"\1", b"\2"]
    assert served.release()
    for bucket in buckets:
        bucket.fill_(7)
    assert bytes(served.read(2) or b"") == b"\2" * (1 << 20)


COPY = """
import sys
import torch
from headway.weightsync.tensors.shared_memory import attach
there = attach(bytes.fromhex(sys.argv[1]))
here = torch.empty(there.shape, dtype=torch.uint8, device="cuda").copy_(there)
torch.cuda.synchronize(there.device)
print(here.device, there.device, int(here.sum()))
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_who_sees_another_gpu_after_its_own_copies_from_its_memory() -> None:
    buffer = torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(reversed(gpu_names(2)))}
    command = [sys.executable, "-c", COPY, gpu_handle(buffer).hex()]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["cuda:0", "cuda:1", str(7 << 20)]


def test_buckets_are_sent_as_they_were_gathered_while_training_goes_on() -> None:
    """The sender waits for the operations that fill a bucket, and for none that the learner begins afterwards."""
    staging = Staging(4096, torch.device("cuda"), memory_is_reused=True)
    staging.begin(iter(awkward_tensors())).take()
    changed = [(name, tensor.flip(0) if tensor.dim() else tensor) for name, tensor in awkward_tensors()]
    trains = threading.Event()

    def late() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in changed:
            torch.cuda._sleep(10_000_000)
            yield name, tensor.cuda()

    def send() -> tuple[list[torch.Tensor], bool]:
        with torch.cuda.stream(torch.cuda.Stream()):
            first = [bucket.cpu() for bucket in gathering.buckets()]
            assert trains.wait(60)
            again = [bucket.cpu() for bucket in gathering.buckets()]
            assert all(map(torch.equal, first, again))
            return again, torch.cuda.default_stream().query()

    gathering = staging.begin(late())
    with ThreadPoolExecutor() as other_thread:
        sent = other_thread.submit(send)
        gathering.take()
        torch.cuda._sleep(4_000_000_000)  # seconds
        trains.set()
        data, is_training_over = sent.result()
    assert not is_training_over
    assert all(map(torch.equal, data, stage(changed, 4096).buckets))
