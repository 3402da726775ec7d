"""Inside the processes of a vLLM on a CPU that computes with the parameters themselves, as on a GPU.

By itself it multiplies with packed copies of them, into which only its own loader can put weights.
"""

import vllm._custom_ops
import vllm.model_executor.layers.utils

from rollout_workers.engines.vllm_extension import WeightExtension

vllm._custom_ops._supports_onednn = False
vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *sizes: False


class UnpackedExtension(WeightExtension):
    """Imported before the model is loaded."""
