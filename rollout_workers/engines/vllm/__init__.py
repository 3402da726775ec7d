"""vLLM as an engine: AsyncLLM in this process, its workers in their own.

    start ─► engine ─┬─ chunks, experts   a request in vLLM's words, its outputs as chunks
                     ├─ arrival           waits for all that was sampled before a pause
                     └─ calls ─► vLLM's processes: extension ─┬─ transfer (names: those by which vLLM loads)
                                                              └─ adapters

The invariant: this module imports nothing, because vLLM's processes import `extension` before they load a model.
"""
