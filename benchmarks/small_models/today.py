"""The backend as the learner drives it: proximal logprobs and an update under GRPO, by part."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headway.learner.algorithm_config import AlgorithmConfig
from headway.learner.backends import open_backend
from headway.learner.backends.fsdp.backend import FsdpBackend
from headway.learner.backends.fsdp.sharding import clip_gradients, gathering, sync_gradients
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.cost import CostModel
from headway.learner.config import ComputeConfig, ModelConfig, OptimizerConfig
from headway.learner.models.model import load_config
from headway.learner.models.shape import shape_of
from headway.learner.objective.objective import Objective

from .clock import PartClock, profiled, timed, waits
from .rows import StepWork


def measured(
    model: ModelConfig,
    device: str,
    compute: ComputeConfig,
    works: Sequence[StepWork],
    vocabulary: int,
    *,
    detail: StepWork,
) -> dict[str, Any]:
    """Return the figures of each amount of work, and the profile of `detail`."""
    began = time.perf_counter()
    backend = open_backend("fsdp", model, OptimizerConfig(), device=device, compute=compute)
    assert isinstance(backend, FsdpBackend)
    found: dict[str, Any] = {"open_s": round(time.perf_counter() - began, 1)}
    cost = CostModel.of_model(shape_of(load_config(model)), device)
    for work in works:
        rows = work.rows(vocabulary, cost)
        began = time.perf_counter()
        _update(backend, rows)()
        first_s = time.perf_counter() - began
        found[work.name] = {
            "micro_batches": len(rows),
            "tokens": sum(row.num_tokens for row in rows),
            "computed": sum(row.num_positions for row in rows),
            "first_s": round(first_s, 2),
            "logprobs": timed(partial(backend.logprobs, rows, 1.0)),
            "update": timed(_update(backend, rows)),
        }
    rows = detail.rows(vocabulary, cost)
    found["parts"] = _parts(backend, rows)
    if device == "cuda":
        found["waits"] = waits(_update(backend, rows))
        found["profile"] = profiled(_update(backend, rows))
    return found


def _update(backend: FsdpBackend, rows: Sequence[PackedBatch]) -> Callable[[], object]:
    objective = Objective(AlgorithmConfig(), is_one_update=True)

    def update() -> object:
        return backend.step(rows, objective.token_loss(rows), 1.0, 1e-6)

    return update


def _parts(backend: FsdpBackend, rows: Sequence[PackedBatch]) -> dict[str, Any]:
    """Return the milliseconds of an update's parts: until the process goes on, and until the device is done."""
    loss = Objective(AlgorithmConfig(), is_one_update=True).token_loss(rows)
    module, part = backend._module, PartClock()
    for _ in range(3):
        part.clear()
        part("zero_grad", lambda: backend._optimizer.zero_grad(set_to_none=True))
        with gathering(module):
            for index, batch in enumerate(rows):
                sync_gradients(module, is_last=index == len(rows) - 1)
                part("row", partial(module.row, batch))
                outputs_T = part("forward", partial(module, batch, 1.0))
                outputs_T = part("to host", outputs_T.cpu)
                share, _ = part("loss", partial(loss, index, outputs_T))
                part("backward", share.backward)
        part("clip", lambda: clip_gradients(backend._parameters, 1.0, backend._device))
        part("optimizer", backend._optimizer.step)
    return part.parts
