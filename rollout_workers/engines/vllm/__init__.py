"""vLLM as an engine: AsyncLLM in this process, its workers in their own.

    start ─► engine ─┬─ chunks, experts   a request in vLLM's words, its answers in ours
                     ├─ arrival           all that was sampled before a pause has come
                     └─ calls ─► vLLM's processes: extension ─► transfer (names: of what vLLM loads)

Nothing is imported here: vLLM's processes import `extension` before they load a model.
"""
