"""The cases that can be measured, by name."""

import re

BACKENDS = ("fsdp", "megatron")
ATTENTION = {"sdpa": "sdpa", "flex": "flex_attention"}
"""Packed attention of transformers that needs no flash-attn, by the name that it has there."""
BASELINES = {
    "transformers-padded": [f"transformers-padded-{rows}" for rows in ("budget", 1, 2, 4)],
    "transformers-packed": [f"transformers-packed-{attention}" for attention in ATTENTION],
}
"""The cases behind a short name: rows up to the token budget, or so many at once; every attention."""

BASELINE = re.compile(rf"transformers-(padded-(budget|[1-9]\d*)|packed-({'|'.join(ATTENTION)}))")


def stands_for(names: str) -> list[str]:
    """Return the cases of a list with commas, in order and once each. Raises ValueError for an unknown name."""
    found = [one for name in names.split(",") for one in BASELINES.get(name, [name])]
    for name in found:
        if name not in BACKENDS and not BASELINE.fullmatch(name):
            raise ValueError(f"there is no case {name}; there are {', '.join([*BACKENDS, *BASELINES])}")
    return list(dict.fromkeys(found))
