"""Mathematics on packed tensors: pure functions, one tested definition each. Imports nothing of ours.

Notation: T packed tokens, S sequences laid end to end, G samples of one prompt. A sequence is all that one rollout
trains, with every row of an agent's; `gae` alone looks at rows. `cu_seqlens` [S + 1] says where each sequence begins,
`loss_mask_T` is 1 where a token is trained. pi is the policy with gradient (`current_logprobs`), mu the one that
sampled (`behavior_logprobs`), pi_prox the learner's before the update (`proximal_logprobs`).

    rewards ─ advantages.py ─► A_S              comparisons: with the group, the others in it, the batch
    rewards, tree ─ turns.py ─► A_K             of turns: returns along the tree of an episode, compared with the group
    rewards, values ─ returns.py ─► A_T         a critic's: generalized estimation, whitening, turns; terms of a reward:
                                                length, overlong penalty, KL taken from it
    logprobs ─ ratios.py ─► r_T, s_S            of a token; of a sequence: product, geometric mean, GSPO's token form
    r_T, A_T ─ objectives.py ─► losses_T        clipped (PPO, GSPO, DPPO, SAPO), weighted (CISPO, TOPR, ASPO, no clip)
    pi_prox / mu ─ corrections.py ─► weights_T  importance weights, age; correction_masks.py: rejection, second moment
    pi, mu, lag ─ proximal.py ─► pi_prox        interpolated by age instead of a forward pass
    logprobs ─ ratios.py ─► penalty_T           estimates of a KL divergence: k1, k2, k3
    aggregation.py ─► shares_T                  means, sums over a sequence, fixed denominator: loss = sum(w * losses)
    preferences.py                              losses of pairs (DPO), of single responses (KTO), of scores
    distillation.py                             cross-entropy with given tokens (SFT), distillation from a teacher
    metrics.py                                  sums that add up over micro-batches and ranks; ESS; tokens left by masks
    tokens.py                                   the inputs of objectives and corrections; sums and means over a sequence
    presets.py                                  published names -> compositions; imports no torch

The invariant: a loss never depends on how sequences were packed, split into micro-batches or spread over
ranks, because every function works on tokens or whole sequences and the denominators are those of the whole
batch. A metric is named `X_sum` with its `X_count`, or is a maximum, and is detached.

This module imports nothing, so that `algorithms.presets` can be read without torch.
"""
