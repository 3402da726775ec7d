"""Memory that processes share is freed when one of them is killed, and a lack of it is an error with a remedy."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from headway.broker.errors import NoRoomError, WeightSyncError
from headway.weightsync.deliveries import attachable_buckets
from headway.weightsync.tensors.buckets import allocate
from headway.weightsync.tensors.shared_memory import (
    _decode,
    attach,
    attachable_file,
    attachable_memory,
    handle_of,
    host_buffer,
)
from tests.full_disk import no_files_over
from tests.weightsync.learner_process import hold_buffer
from tests.weightsync.processes import ForkedProcess

NBYTES = 12_345_678


@pytest.fixture
def holder() -> Iterator[ForkedProcess]:
    process = ForkedProcess(hold_buffer, NBYTES)
    yield process
    process.close()


def test_a_killed_maker_leaves_no_file_and_those_who_mapped_it_keep_it(holder: ForkedProcess) -> None:
    handle = holder.next()
    opened = [entry.stat() for entry in Path(f"/proc/{holder.pid}/fd").iterdir()]
    assert {file.st_nlink for file in opened if file.st_size == NBYTES} == {
        0
    }  # memory without a name ends with the last process that maps it
    mapped = attach(handle)
    assert torch.equal(mapped, torch.full((NBYTES,), 7, dtype=torch.uint8))
    holder.send(signal.SIGKILL)
    holder.until_killed()
    assert torch.equal(mapped, torch.full((NBYTES,), 7, dtype=torch.uint8))
    with pytest.raises(WeightSyncError, match="its writer is gone"):
        attach(handle)


def test_both_see_what_either_writes() -> None:
    with host_buffer(1000) as (buffer, handle):
        mapped = attach(handle)
        buffer.fill_(1)
        mapped[999] = 2
        assert (int(mapped[0]), int(buffer[999])) == (1, 2)
    with host_buffer(0) as (buffer, handle):
        assert attach(handle).numel() == buffer.numel() == 0


def test_a_handle_whose_descriptor_is_another_file_now_is_refused(tmp_path: Path) -> None:
    with host_buffer(1000) as (_, handle):
        pass
    taken = [os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT) for _ in range(100)]  # one is the buffer's old number
    try:
        with pytest.raises(WeightSyncError, match="it leads to another file"):
            attach(handle)
        assert (tmp_path / "other").stat().st_size == 0
    finally:
        for descriptor in taken:
            os.close(descriptor)


def encode(**fields: object) -> bytes:
    return msgspec.msgpack.encode(["host", *fields.values()])


@pytest.mark.parametrize(
    "handle",
    [b"", b"\xc1", b"\x90", msgspec.msgpack.encode(["host", "/proc/1/fd/1"]), b"\xff" * 100, encode(path=1)],
)
def test_bytes_that_are_no_handle_are_refused(handle: bytes) -> None:
    with pytest.raises(WeightSyncError, match="no handle of shared memory"):
        attach(handle)


@pytest.mark.parametrize("nbytes", [1001, -1, 1 << 62])
def test_a_handle_that_promises_other_memory_is_refused(nbytes: int) -> None:
    with host_buffer(1000) as (_, handle):
        lying = encode(**{**msgspec.structs.asdict(_decode(handle)), "nbytes": nbytes})
        with pytest.raises(WeightSyncError, match=f"it has 1000 bytes, promised were {nbytes}"):
            attach(lying)


def test_a_path_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="cannot be mapped here"):
        attach(encode(path="/proc/self/fd/\0", nbytes=1, device=1, inode=1, is_private=False))


def test_no_room_for_a_buffer_is_told_and_passes() -> None:
    with no_files_over(NBYTES - 1), pytest.raises(NoRoomError, match=f"no room for {NBYTES} bytes of weights in /"):
        host_buffer(NBYTES).__enter__()
    with host_buffer(NBYTES) as (buffer, _):
        assert buffer.numel() == NBYTES


def test_no_memory_to_receive_into_is_told() -> None:
    with pytest.raises(NoRoomError, match=f"no memory on cpu for {1 << 50} bytes of weights"):
        allocate([1 << 50])


def test_memory_can_be_attached_as_long_as_a_tensor_of_it_lives() -> None:
    memory = attachable_memory(NBYTES)
    part = memory[1000:2000]
    handle = handle_of(part)
    assert handle is not None
    assert handle == handle_of(memory)
    del memory
    mapped = attach(handle)
    part.fill_(3)
    assert (mapped.numel(), int(mapped[1999]), int(mapped[999])) == (NBYTES, 3, 0)
    assert handle_of(mapped) is None  # it may be gone here before it is gone there
    del part
    with pytest.raises(WeightSyncError, match="cannot be mapped here"):
        attach(handle)
    assert int(mapped[1999]) == 3
    empty = attachable_memory(0)
    assert handle_of(empty) is not None
    assert handle_of(torch.zeros(0)) is handle_of(torch.zeros(3)) is None


def test_a_file_is_attached_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    path.chmod(0o400)
    content = attachable_file(path)
    handle = handle_of(content[100:])
    assert handle is not None
    there = attach(handle)
    assert there.tolist() == list(range(200))
    there.fill_(1)
    assert content.tolist() == list(range(200))
    content.fill_(2)
    assert path.read_bytes() == bytes(range(200))
    path.unlink()
    assert attach(handle).tolist() == list(range(200))
    del content
    with pytest.raises(WeightSyncError, match="cannot be mapped here"):
        attach(handle)
    path.write_bytes(b"")
    with pytest.raises(NoRoomError, match="cannot be mapped"):
        attachable_file(path)
    with pytest.raises(OSError, match="No such file"):
        attachable_file(tmp_path / "other")


def test_buckets_are_in_ordinary_memory_where_there_is_no_room(caplog: pytest.LogCaptureFixture) -> None:
    sizes = [1024, 0, 512]
    attachable = attachable_buckets(sizes)
    assert [bucket.numel() for bucket in attachable] == sizes
    assert len({handle_of(bucket) for bucket in attachable} - {None}) == 1
    attachable[0].fill_(1)
    attachable[2].fill_(2)
    assert int(attachable[0].min()) == 1  # they do not overlap
    with no_files_over(1), caplog.at_level("INFO"):
        ordinary = attachable_buckets(sizes)
    assert [(bucket.numel(), handle_of(bucket)) for bucket in ordinary] == [(size, None) for size in sizes]
    assert "1536 bytes of weights come into ordinary memory" in caplog.text
    assert "--shm-size" in caplog.text
    assert attachable_buckets([]) == ()
    with pytest.raises(NoRoomError):
        attachable_buckets([1 << 62, 1 << 62])
