"""Scores of whole responses, as a reward model gives them."""

import torch
from torch.nn import functional as F

from headway.algorithms.metrics import Metrics, mean


def bradley_terry(
    scores_S: torch.Tensor, *, margin: float | torch.Tensor = 0.0, centering: float = 0.0
) -> tuple[torch.Tensor, Metrics]:
    """loss_p = -log sigmoid(s_c - s_r - margin_p) + centering (s_c + s_r)^2, s_c and s_r the scores of pair p.

    Trains a reward model from the scores of whole responses; losses are [P]. `margin`: one number for all pairs, or
    [P], such as a rating of how much better the chosen response is. `centering` keeps the scores of a pair near 0 on
    average, which their difference alone leaves open. Metrics: `score_chosen` and `score_rejected`, the mean scores;
    `score_margin`, the mean difference; `score_accuracy`, the share of pairs in which the chosen response scores
    higher.

    Source: Bradley and Terry 1952; InstructGPT, Ouyang et al. 2022 (arXiv:2203.02155), equation 1; the margin: Llama 2,
    Touvron et al. 2023 (arXiv:2307.09288), section 3.2.2; centering: Eisenstein et al. 2023 (arXiv:2312.09244),
    equation 2. Both are 0, which is none, as in TRL, which recommends 0.01 for centering.
    """
    chosen_P, rejected_P = scores_S[0::2], scores_S[1::2]
    gaps_P = chosen_P - rejected_P
    losses_P = -F.logsigmoid(gaps_P - margin) + centering * (chosen_P + rejected_P) ** 2
    metrics = {**mean("score_chosen", chosen_P), **mean("score_rejected", rejected_P)}
    return losses_P, {**metrics, **mean("score_margin", gaps_P), **mean("score_accuracy", gaps_P > 0)}
