"""`python -m benchmarks.stage_throughput`: tokens per second of supervised stages, ours and TRL's own trainers'.

    a directory of random weights, files of long-tailed conversations or pairs, one fixed seed
                                      │
                                      ▼
    one case, in a process of its own: warm-up steps, then measured steps of the same stage over the same file
        headway, headway-compiled    `open_stage` over `open_backend`: packed rows, reference logprobs computed once
        trl-packed-sdpa, -varlen[-compiled]  SFTTrainer, packing=True (best fit, without padding)
        trl-padded-N                 DPOTrainer, N pairs a forward pass, reference logprobs computed before training
                                      │
                                      ▼
    OUTPUT/results.jsonl, a line a case ──► one JSON object

All cases hold weights and moments in float32 and compute in bfloat16, without recomputation. `varlen` is torch's own
variable-length kernel (FlashAttention 2), which stands in for the flash-attn package. DPOTrainer has no packing.
"""
