"""Losses on labelled data, on packed rows: imitation, preferences, scores, values, a teacher.

    imitation.py        tokens to be repeated                              losses_T
    preferences.py      pairs of responses: DPO and its kin, SimPO, ORPO   losses_P
    unpaired.py         responses that are good or bad: KTO                losses_S
    scores.py           pairs of scores, for a reward model                losses_P
    values.py           a critic's values                                  losses_T
    distillation.py     a teacher's logprobs                               losses_T

A function of tokens returns losses_T [T], 0 where the mask is 0, to be aggregated as an objective's are. A function of
pairs returns losses_P [P], one per pair: sequence 2p of the row is the chosen response of pair p, sequence 2p + 1 the
rejected one, so a row holds whole pairs. A function of single responses returns losses_S [S].

The invariant: nothing is averaged here. The caller divides sums over tokens, pairs or responses by their number in the
whole batch, so neither packing nor the number of ranks changes a loss. Logarithms of ratios are clamped per token as in
`algorithms.ratios`.
"""
