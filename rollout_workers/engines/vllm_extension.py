"""What runs inside vLLM's worker process: reading new weights from a file that the front end wrote."""

import torch
from safetensors import safe_open
from vllm.platforms import current_platform


class WeightExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`); called through `collective_rpc`."""

    def headway_load(self, path: str) -> None:
        """Load every tensor of a safetensors file, by checkpoint name. Generation must be paused."""
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            self.reload_weights(  # type: ignore[attr-defined]
                weights_iterator=((name, file.get_tensor(name)) for name in names)
            )
        if current_platform.is_cpu():
            repack_experts(self.model_runner.get_model())  # type: ignore[attr-defined]


def repack_experts(model: torch.nn.Module) -> None:
    """vLLM's CPU experts compute from a packed copy that a reload leaves as it was: pack them again."""
    for module in model.modules():
        if type(module).__name__ == "RoutedExperts":
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)  # type: ignore
