"""Mathematics on packed tensors: pure functions, one tested definition each. Imports nothing of ours.

Notation: T packed tokens, S sequences laid end to end, G samples of one prompt. `cu_seqlens` [S + 1] says
where each sequence begins, `loss_mask_T` is 1 where a token is trained. pi is the policy with gradient
(`current_logprobs`), mu the one that sampled (`behavior_logprobs`), pi_prox the learner's before the update
(`proximal_logprobs`).

    rewards ─ advantages.py ─► A_S              group mean and std, group mean, leave one out
    logprobs ─ ratios.py ─► r_T, s_S            token; sequence: product, geometric mean, GSPO's token form
    r_T, A_S ─ objectives/ ─► losses_T          ppo_clip, gspo, policy_gradient
    pi_prox / mu ─ corrections/ ─► weights_T    truncated_is (token, sequence, geometric), decoupled
    kl.py ─► penalty_T                          k1, k2, k3
    aggregation.py ─► shares_T                  token mean, sequence mean; loss = sum_T(shares * losses)
    metrics.py                                  sums that add up over micro-batches and ranks; ESS
    segments.py                                 sums, means and broadcasts over the sequences of a row
    presets.py                                  names people know -> compositions; imports no torch

The invariant: a loss never depends on how sequences were packed, split into micro-batches or spread over
ranks, because every function works on tokens or whole sequences and the denominators are those of the whole
batch. A metric is named `X_sum` with its `X_count`, or is a maximum, and is detached.

This module imports nothing, so that `algorithms.presets` can be read without torch.
"""
