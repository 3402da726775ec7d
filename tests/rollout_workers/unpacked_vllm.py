"""Inside the processes of a vLLM on a CPU that computes with the parameters themselves, as on a GPU.

By itself it multiplies with packed copies of them, into which only its own loader can put weights.
"""

from typing import Any

import vllm._custom_ops
import vllm.model_executor.layers.utils

from rollout_workers.engines.vllm.extension import WeightExtension

vllm._custom_ops._supports_onednn = False
vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *sizes: False


class UnpackedExtension(WeightExtension):
    """Imported before the model is loaded."""

    rank: int

    def fail_in_one_process(self) -> None:
        """The next update, where there are several."""
        transfer: Any = self.weight_transfer_engine
        mapped = transfer._mapped

        class Failing:
            def tensors(self, shared: bytes) -> None:
                transfer._mapped = mapped
                raise RuntimeError("told to fail")

        if self.rank == 1:
            transfer._mapped = Failing()
