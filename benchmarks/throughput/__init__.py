"""`python -m benchmarks.throughput`: tokens per second, MFU and memory of real training steps, ours and transformers'.

    shapes ──checkpoint──► Hugging Face directory of random weights ─┐
    workload: long-tailed lengths, one fixed seed ───────────────────┤
                                                                     ▼
    one case, in processes of its own (`isolated`):  warm-up steps, measured steps, two profiled steps
        fsdp, megatron           `open_backend`, `rows.packing.pack`, `objective.objective`, `backend.step`
        transformers-padded-*    right-padded rows in order of arrival, attention mask, sdpa, full logits
        transformers-packed-*    one row with position ids that restart, sdpa's mask or flex attention, full logits
                                                                     ▼
    OUTPUT/results.jsonl, a line a case as it ends ──► one JSON object

All cases train the same sequences with the same objective, and weights, moments and gradients have the same number
formats, sharded by `fully_shard`. A case that runs out of memory or dies costs only itself; its error stands in its
line. Cases whose figures are there already are not repeated.
"""
