"""SGLang as an engine: its front end in this process, its schedulers in their own.

    open_sglang ─► sglang_engine ─┬─ sglang_requests   a sample as requests, one for each stretch under one version
       │                          └─ weight_loader ─► SGLang's schedulers: LoadedModel, lora_pool
       └─ sglang_processes    SGLang's processes, which end with the worker

The invariant: a request of SGLang runs under one version from its first token to its last. A swap ends all requests,
loads, and sends each sample again with the tokens that it has. So no token's version is guessed, and nothing depends on
what SGLang's pause delivers late.
"""
