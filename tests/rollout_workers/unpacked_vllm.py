"""An extension of vLLM's processes on a CPU, which then compute with the parameters themselves, as on a GPU.

Without it vLLM multiplies with packed copies of them, into which only its own loader can put weights.
"""

from typing import Any

import vllm._custom_ops
import vllm.model_executor.layers.utils

from headway.rollout_workers.engines.vllm.transfer_engine import WeightExtension

vllm._custom_ops._supports_onednn = False
vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *sizes: False


class UnpackedExtension(WeightExtension):
    """Extends a worker of vLLM, which imports this module before it loads the model."""

    rank: int

    def fail_in_one_process(self) -> None:
        """Make the next update fail in one process, where there are several."""
        transfer: Any = self.weight_transfer_engine
        mapped = transfer._mapped

        class Failing:
            def tensors(self, shared: bytes) -> None:
                transfer._mapped = mapped
                raise RuntimeError("told to fail")

        if self.rank == 1:
            transfer._mapped = Failing()
