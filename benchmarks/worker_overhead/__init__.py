"""Tokens per second of a real worker against vLLM alone, with the same weights, arguments, prompts and sampling.

    python -m benchmarks.worker_overhead [--shape moe-2.4b] [--concurrent 512] [--seconds 60] [--update-every 10]
    python -m benchmarks.worker_overhead --paced           without a GPU: a core that samples nothing, a step in 12 ms

    __main__    the learner's stand-in in this process; server, bare vLLM and `headway worker` in their own
    learner     feeds prompts, takes, commits, publishes weights; trains nothing
    bare        requests straight to AsyncLLM, read by one task each
    paced       vLLM's front end around a core that computes nothing

The model has random weights, so any set of n tokens out of V comes up once in V / n samples.
Its config.json names V / `--mean-tokens` tokens as those that end a response, which makes lengths geometric, cut at
`--max-new-tokens`: one in fifty is four times as long as the mean.
"""
