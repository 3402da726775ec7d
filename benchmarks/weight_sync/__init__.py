"""The speed at which new weights reach a running engine, beside the engine's own ways: see `__main__`.

`learner.py` publishes with the product's Publisher, `engine.py` follows with its Subscriber and swaps under load,
each in a process and on a GPU of its own; `native.py` does the same with vLLM's weight transfer, `native_sglang.py`
with SGLang's.
"""
