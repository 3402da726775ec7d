"""Brings new weights into vLLM's processes, by a transfer engine behind vLLM's own API for weight transfer.

    start_weight_update ─► update_weights(what Handover gave), for every part ─► finish_weight_update ─► headway_outcome

The API returns no answer. If one of several processes raises, vLLM leaves the answers of the others where the next call
takes them for its own. So this module raises nothing, and the engine asks for the outcome (`extension.py`).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from headway.rollout_workers.engines.held import Held
from headway.rollout_workers.engines.placing.direct_loading import DirectLoading
from headway.rollout_workers.engines.placing.kept_placements import kept_placements
from headway.rollout_workers.engines.placing.shared_tensors import Mapped
from headway.rollout_workers.engines.placing.sleeping import Kept, derived_tensors

from .adapters import unwrapped

logger = logging.getLogger(__name__)


@dataclass
class Nothing(WeightTransferInitInfo):
    """The empty information for a connection: none is made."""


@dataclass
class ArrivedWeights(WeightTransferUpdateInfo):
    """A version's tensors, or some of them, that have arrived for vLLM's processes."""

    shared: bytes
    """The bytes that `Handover` gave."""
    is_whole: bool


class HeadwayTransfer(WeightTransferEngine[Nothing, ArrivedWeights]):
    """Loads tensors in one of vLLM's processes: its parts of every tensor that `Handover` gives, by checkpoint name."""

    init_info_cls = Nothing
    update_info_cls = ArrivedWeights
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._mapped = Mapped()
        self._loading = DirectLoading(
            self._reload,
            lambda: dict(self.model.named_parameters()),
            derived=lambda: derived_tensors(self.model),
            keeps_packed=current_platform.is_cpu() and keeps_packed(self.model),
            kept=kept_placements(self._kind()),
        )
        self._kept: Kept | None = None
        self.failure = ""
        """Why the last version failed: the first failure if several parts of it failed."""

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Begin a version. Copies go past the loader, and `_reload` prepares the loader where it is needed."""
        self.failure = ""
        self._loading.begin()

    def finish_weight_update(self) -> None:
        """End a version: all parts have come, or those that came are of no use."""
        self._noting_failure(self._finish)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load tensors and note a failure in `failure`. vLLM's own method waits for a GPU even where there is none."""
        self._noting_failure(lambda: self.receive_weights(self.parse_update_info(update_info)))

    def receive_weights(self, update_info: ArrivedWeights) -> None:
        """Load tensors. Generation must be paused. The sender may overwrite the memory afterwards."""
        tensors = self._mapped.tensors(update_info.shared)
        if update_info.is_whole:
            self._loading.load(tensors)
        else:
            self._loading.load_part(tensors)
        if not current_platform.is_cpu():
            torch.cuda.synchronize()

    def mapped(self, shared: bytes) -> Mapping[str, torch.Tensor]:
        """Return the tensors that `Handover` gave. The sender may overwrite them once the call that needs them has
        returned."""
        return self._mapped.tensors(shared)

    def held(self) -> Held | None:
        """Return what this process holds of every published tensor; None if that is not known."""
        return self._loading.held()

    def before_sleep(self) -> None:
        """Save what a GPU loses in a sleep. On a CPU vLLM's sleep loses nothing."""
        if not current_platform.is_cpu():
            derived = {name: tensor for name, tensor in derived_tensors(self.model).items() if tensor.is_cuda}
            self._kept = Kept(derived, dict(self.model.named_parameters()), self._loading.loaded_rows())

    def after_wake(self) -> None:
        """Restore everything that was on the device before the sleep and is no weight."""
        if self._kept is not None:
            self._kept.restore()
            self._kept = None

    def shutdown(self) -> None:
        """Do nothing: there is nothing to free."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Raise: vLLM 0.26 wants this method defined, and versions come through weightsync."""
        raise NotImplementedError

    def _noting_failure(self, act: Callable[[], None]) -> None:
        if self.failure:
            return
        try:
            act()
        except Exception as error:  # see the module's docstring
            logger.exception("weights not loaded")
            self.failure = f"{type(error).__name__}: {error}"

    def _kind(self) -> str:
        """Return what decides where vLLM's loader puts weights, besides their names and shapes."""
        process = f"{torch.distributed.get_rank()} of {torch.distributed.get_world_size()}"
        return f"vllm {vllm.__version__} {current_platform.device_type} {type(self.model).__name__} {process}"

    def _finish(self) -> None:
        self._loading.end()
        if current_platform.is_cpu():
            repack_experts(self.model)
        else:
            torch.cuda.synchronize()

    def _reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with unwrapped(self.model):
            initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(tensors))
            finalize_layerwise_reload(self.model, self.model_config)


def keeps_packed(model: torch.nn.Module) -> bool:
    """Whether vLLM for CPUs packs some of the weights. It always packs experts; of other matrices it leaves nothing
    behind."""
    return any(type(module).__name__ == "RoutedExperts" for module in model.modules()) or any(
        parameter.numel() == 0 for parameter in model.parameters()
    )


def repack_experts(model: torch.nn.Module) -> None:
    """Pack the experts again: vLLM's CPU experts compute from a packed copy that a reload leaves unchanged."""
    for module in model.modules():
        if type(module).__name__ == "RoutedExperts":
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)  # type: ignore
