"""Brings new weights into vLLM's processes, by a transfer engine behind vLLM's own API for weight transfer.

    start_weight_update ─► update_weights(what Handover gave), for every part ─► finish_weight_update ─► headway_outcome

The API returns no answer. If one of several processes raises, vLLM leaves the answers of the others where the next call
takes them for its own. So this module raises nothing, and the engine asks for the outcome (`WeightExtension`).

vLLM's worker processes import this module before they load a model: it registers the transfer engine there.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from headway.rollout_workers.engines.base import WeightFingerprints
from headway.rollout_workers.engines.weight_loading.direct_loading import DirectLoading, SleepBackup, derived_tensors
from headway.rollout_workers.engines.weight_loading.shared_tensors import TensorMapper
from headway.rollout_workers.engines.weight_loading.weight_placement import placement_cache

from .lora_buffers import adapter_fingerprints, replace_adapter, unwrapped

logger = logging.getLogger(__name__)


@dataclass
class EmptyInitInfo(WeightTransferInitInfo):
    """The empty information for a connection: none is made."""


@dataclass
class ArrivedWeights(WeightTransferUpdateInfo):
    """A version's tensors, or some of them, that have arrived for vLLM's processes."""

    shared: bytes
    """The bytes that `Handover` gave."""
    is_whole: bool


class HeadwayTransfer(WeightTransferEngine[EmptyInitInfo, ArrivedWeights]):
    """Loads tensors in one of vLLM's processes: its parts of every tensor that `Handover` gives, by checkpoint name."""

    init_info_cls = EmptyInitInfo
    update_info_cls = ArrivedWeights
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._mapped = TensorMapper()
        self._loading = DirectLoading(
            self._reload,
            lambda: dict(self.model.named_parameters()),
            derived=lambda: derived_tensors(self.model),
            keeps_packed=current_platform.is_cpu() and keeps_packed(self.model),
            kept=placement_cache(self._kind()),
        )
        self._kept: SleepBackup | None = None
        self.failure = ""
        """Why the last version failed: the first failure if several parts of it failed."""

    def init_transfer_engine(self, init_info: EmptyInitInfo) -> None:
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

    def held(self) -> WeightFingerprints | None:
        """Return what this process holds of every published tensor; None if that is not known."""
        return self._loading.held()

    def before_sleep(self) -> None:
        """Save what a GPU loses in a sleep. On a CPU vLLM's sleep loses nothing."""
        if not current_platform.is_cpu():
            derived = {name: tensor for name, tensor in derived_tensors(self.model).items() if tensor.is_cuda}
            self._kept = SleepBackup(derived, dict(self.model.named_parameters()), self._loading.loaded_rows())

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


WeightTransferEngineFactory.register_engine("headway", HeadwayTransfer)


class WeightExtension:
    """Methods mixed into vLLM's worker (`worker_extension_cls`), for what vLLM's API does not offer."""

    weight_transfer_engine: HeadwayTransfer
    model_runner: Any

    def headway_outcome(self, wants_fingerprints: bool) -> tuple[str, tuple[bytes, bytes] | None]:
        """Return why the last update failed here, or "". If wanted and known, also return what this process holds of
        the tensors of the update, in their order: the bytes of `WeightFingerprints`'s arrays."""
        transfer = self.weight_transfer_engine
        held = transfer.held() if wants_fingerprints and not transfer.failure else None
        return transfer.failure, None if held is None else (held.fingerprints_N.tobytes(), held.elements_N.tobytes())

    def headway_adapter(
        self, shared: bytes, scale: float, place: int, wants_fingerprints: bool
    ) -> tuple[str, tuple[bytes, bytes] | None]:
        """Take the adapter that `Handover` gave into a place, and return what `headway_outcome` does, of it."""
        try:
            tensors, lora = self.weight_transfer_engine.mapped(shared), self.model_runner.lora_manager
            replace_adapter(lora, tensors, scale, place)
            held = adapter_fingerprints(lora, tensors, scale, place) if wants_fingerprints else None
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            return f"{type(error).__name__}: {error}", None
        return "", None if held is None else (held.fingerprints_N.tobytes(), held.elements_N.tobytes())

    def headway_before_sleep(self) -> None:
        """Save what vLLM's deepest sleep would lose and no version brings back."""
        self.weight_transfer_engine.before_sleep()

    def headway_after_wake(self) -> None:
        """Restore what was saved before the sleep."""
        self.weight_transfer_engine.after_wake()
