"""Small recipes: a Qwen3-MoE of a few thousand parameters, and a task from which even random weights learn."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Section = Mapping[str, Any]

SEVENS = '''"""One's own reward, in verl's signature: how much of the response is a 7."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": solution_str.count("7") / 16, "length": len(solution_str)}
'''
"""The source of sevens.py, a user's own reward, which each machine has as code in every role's directory."""

MODEL: Section = {
    "random": {
        "architecture": "qwen3_moe",
        "alphabet": "0123456789+-*=,#^",
        "config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "initializer_range": 0.1,
        },
    }
}

OF_EXPERTS = {"moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob"}
DENSE: Section = {
    "random": {
        **MODEL["random"],
        "architecture": "qwen3",
        "config": {name: value for name, value in MODEL["random"]["config"].items() if name not in OF_EXPERTS},
    }
}
"""MODEL without experts."""

TINY: Mapping[str, Any] = {
    "run": {"name": "tiny"},
    "model": MODEL,
    "prompts": {"kind": "arithmetic", "options": {"min_operations": 2, "max_operations": 3}},
    "rewards": [{"kind": "sevens:compute_score"}],
    "staleness": {"max_lag": 2},
    "learner": {"steps": 4, "groups_per_step": 4, "group_size": 4, "micro_batch_tokens": 1024},
    "optimizer": {"learning_rate": 5e-3},
    "sampling": {"max_new_tokens": 16},
    "engine": {"max_concurrent": 8, "max_model_len": 48},
    "workers": {"count": 2, "heartbeat_s": 0.2},
    "weights": {"broadcast_timeout_s": 3},
    "broker": {"lease_ttl_s": 3},
    "checkpoint": {"every_steps": 4},
    "evaluation": {"prompts": 0},
}


def write_recipe(directory: Path, **sections: Any) -> Path:
    """Write TINY as a file, with these keys of its sections (or whole lists) replaced. JSON is YAML."""
    recipe = {**TINY}
    for name, section in sections.items():
        below = recipe.get(name)
        recipe[name] = {**below, **section} if isinstance(below, Mapping) and isinstance(section, Mapping) else section
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "recipe.yaml"
    path.write_text(json.dumps(recipe, indent=2))
    return path
