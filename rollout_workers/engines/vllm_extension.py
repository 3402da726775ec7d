"""What runs inside vLLM's worker processes: reading new weights from a file that the front end wrote."""

from collections.abc import Iterable

import torch
from safetensors.torch import load_file
from vllm.platforms import current_platform

from .direct_loading import DirectLoading


class WeightExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`); called through `collective_rpc`."""

    _headway: DirectLoading | None = None

    def headway_load(self, path: str) -> None:
        """Load every tensor of a safetensors file, by checkpoint name. Generation must be paused."""
        if self._headway is None:
            packed = current_platform.is_cpu() and keeps_packed(self._headway_model())
            self._headway = DirectLoading(self._headway_reload, self._headway_parameters, keeps_packed=packed)
        self._headway.load(load_file(path))
        if current_platform.is_cpu():
            repack_experts(self._headway_model())

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
