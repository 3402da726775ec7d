"""vLLM as an engine: AsyncLLM in this process, its workers in their own.

    open_vllm ─► vllm_engine ─┬─ vllm_requests   a request in vLLM's words, its outputs as chunks
       │                      └─► vLLM's processes: transfer_engine ─► lora_buffers
       └─ fork_server ─► fork_preload, scheduler: in vLLM's processes

The invariant: this module imports nothing: vLLM's processes import `transfer_engine` before they load a model.
"""
