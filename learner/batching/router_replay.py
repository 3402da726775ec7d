"""Router replay: the models whose routers can replay the engine's choice of experts, and checks of recorded choices.

Engine and learner round differently, so near a tie their routers send a token to different experts, and its logprobs
then differ by far more than rounding. With `algorithm.router_replay` the engine's choices travel with the sample and
the learner's pass takes them; the weights of the chosen experts' outputs still come, with gradient, from the learner's
own router. Source: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers".
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.broker.errors import ConfigError, HeadwayError
from headway.broker.schema import Experts, Trajectory
from headway.learner.models.shape import num_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SOFTMAX_ROUTED = ("qwen3_moe", "qwen2_moe", "olmoe")
"""Model types whose routers take the largest probabilities of a softmax over all experts."""


class RoutingError(HeadwayError):
    """A sample's chosen experts are missing, or cannot be this model's."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The sizes of a model's expert choices for every token."""

    layers: int
    """The number of layers with experts."""
    experts: int
    per_token: int

    def experts_of(self, trajectory: Trajectory) -> Experts:
        """The trajectory's chosen experts. Raises RoutingError."""
        chosen = trajectory.experts
        if chosen is None:
            raise RoutingError(
                f"{trajectory.tid} does not say which experts its tokens were given, and algorithm.router_replay=true"
                f" needs that: {trajectory.worker} generated it without. Set it to false again; or resume with"
                " --rewind-to STEP --regenerate, which forgets what was sampled."
            )
        highest = int(chosen.max())
        if chosen.shape[1:] != (self.layers, self.per_token) or highest >= self.experts:
            raise RoutingError(
                f"{trajectory.tid}: {trajectory.worker} reports experts up to {highest}, {chosen.shape[2]} in each"
                f" of {chosen.shape[1]} layers; the model chooses {self.per_token} of {self.experts} in each of"
                f" {self.layers}. Its engine must run the learner's model."
            )
        return chosen


def routing_of(config: "PretrainedConfig") -> Routing:
    """Returns the model's sizes. Raises ConfigError if it has no experts, or a choice that cannot be replayed."""
    experts = num_experts(config)
    if not experts:
        raise ConfigError(
            f"algorithm.router_replay=true replays the choice of experts, and this {config.model_type} has none; set it"
            " to false."
        )
    if config.model_type not in SOFTMAX_ROUTED:
        raise ConfigError(
            f"algorithm.router_replay=true knows the routers of {', '.join(SOFTMAX_ROUTED)}, not {config.model_type}'s;"
            " set it to false."
        )
    every, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or ()
    sparse = [n for n in range(config.num_hidden_layers) if n not in dense and (n + 1) % every == 0]
    return Routing(layers=len(sparse), experts=experts, per_token=config.num_experts_per_tok)
