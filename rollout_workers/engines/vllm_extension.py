"""What runs inside vLLM's worker processes: loading new weights from memory that the front process shares."""

from collections.abc import Iterable

import torch
from vllm.platforms import current_platform

from weightsync.fingerprint import UNSIGNED

from .direct_loading import DirectLoading
from .shared_tensors import Mapped


class WeightExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`); called through `collective_rpc`."""

    _headway: DirectLoading | None = None
    _headway_mapped: Mapped

    def headway_load(self, shared: bytes) -> None:
        """Load every tensor that `Handover` speaks of, by checkpoint name. Generation must be paused."""
        if self._headway is None:
            self._headway_mapped = Mapped()
            packed = current_platform.is_cpu() and keeps_packed(self._headway_model())
            self._headway = DirectLoading(
                self._headway_reload,
                self._headway_parameters,
                derived=lambda: derived_tensors(self._headway_model()),
                keeps_packed=packed,
            )
        self._headway.load(self._headway_mapped.tensors(shared))
        if current_platform.is_cpu():
            repack_experts(self._headway_model())
        else:
            torch.cuda.synchronize()  # from here on the memory may be written to

    def headway_held(self) -> dict[str, tuple[int, int]] | None:
        """(fingerprint, elements) of what this process holds of every published tensor; None: not known."""
        held = self._headway.held() if self._headway is not None else None
        return None if held is None else {name: (one.fingerprint, one.elements) for name, one in held.items()}

    def _headway_model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.model_runner.get_model()  # type: ignore[attr-defined]
        return model

    def _headway_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self._headway_model().named_parameters())

    def _headway_reload(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.reload_weights(weights_iterator=iter(tensors))  # type: ignore[attr-defined]


def derived_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers, and tensors that modules keep as mere attributes; not the KV cache, which is none of the loader's."""
    found = dict(model.named_buffers())
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and name != "kv_cache":
                found[f"{prefix}.{name}"] = value
    return {name: tensor for name, tensor in found.items() if tensor.element_size() in UNSIGNED}


def keeps_packed(model: torch.nn.Module) -> bool:
    """Whether vLLM for CPUs packs some of the weights: experts always, other matrices then leave nothing behind."""
    return any(type(module).__name__ == "RoutedExperts" for module in model.modules()) or any(
        parameter.numel() == 0 for parameter in model.parameters()
    )


def repack_experts(model: torch.nn.Module) -> None:
    """vLLM's CPU experts compute from a packed copy that a reload leaves as it was: pack them again."""
    for module in model.modules():
        if type(module).__name__ == "RoutedExperts":
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)  # type: ignore
