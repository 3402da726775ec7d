"""The sizes that a model's configuration names, checked before a library takes memory for them."""

from collections.abc import Iterator, Mapping
from typing import Any

from headway.broker.errors import ConfigError

_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 10_000),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "head_dim"), 1 << 16),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "ffn_dim"), 1 << 20),
    **dict.fromkeys(("vocab_size",), 1 << 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 1 << 40),
}
"""The largest value of each size that no model may have as 0, far beyond those of today's models."""
_MOST_OF_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 1 << 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 1 << 20),
}
"""Those that dense models may have as 0."""
_MOST_PARAMETERS = 10**13


def check_possible(config: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError, with the key in `where`, for a size that is no model's, and for more parameters in all than a
    model has."""
    text = text_config(config)
    for sizes, least in ((_MOST, 1), (_MOST_OF_EXPERTS, 0)):
        for key, most in sizes.items():
            for value in _values(text.get(key)):
                if type(value) is not int or not least <= value <= most:
                    shown = str(value)[:40]
                    raise ConfigError(f"{where}.{key} is {shown}; expected an integer from {least} to {most:,}.")
    if (parameters := _parameters(text)) > _MOST_PARAMETERS:
        raise ConfigError(
            f"{where} describes a model of about {parameters:.1e} parameters, and at most {_MOST_PARAMETERS:.0e} are"
            " taken for meant. Check hidden_size, num_hidden_layers, intermediate_size and the number of experts."
        )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a configuration that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _values(value: Any) -> Iterator[Any]:
    """Yield a size, or those of all layers where they differ; nothing where the model's own default holds."""
    if isinstance(value, list):
        yield from value
    elif value is not None:
        yield value


def _parameters(text: Mapping[str, Any]) -> float:
    def size(*keys: str) -> float:
        return max((float(value) for key in keys for value in _values(text.get(key))), default=1.0)

    width = size("hidden_size", "n_embd", "d_model")
    blocks = size("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size")
    experts = max(1.0, size("num_experts", "num_local_experts", "n_routed_experts"))
    layer = 4 * width * width + 3 * width * blocks * experts
    return size("num_hidden_layers", "n_layer", "n_layers", "num_layers") * layer + size("vocab_size") * width
