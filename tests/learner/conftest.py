"""The learner's tests open backends in this process; the default process group must not outlive them."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
