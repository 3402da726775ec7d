"""vLLM as an engine: AsyncLLM in this process, its workers in their own.

    start ─► engine ─┬─ requests   a request in vLLM's words, its outputs as chunks
       │             └─ calls ─► vLLM's processes: weight_transfer ─► lora_buffers
       └─ processes ─► fork_preload, scheduler: in vLLM's processes

The invariant: this module imports nothing: vLLM's processes import `weight_transfer` before they load a model.
"""
