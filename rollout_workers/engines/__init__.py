"""Inference engines: what turns prompts into tokens, with the logprob and the weight version of each.

    worker ── generate ──► engine ── Chunk(tokens, logprobs, version) ──► worker
             swap_weights ──┘  requests go on; what they had cached is computed anew, or kept

`base.py` is the seam; `embedded.py` runs any transformers model here (`decoder.py` is one step of it),
`vllm/` runs vLLM. Invariant: a token is sampled by exactly the weights that its chunk names, and its logprob is
the one that it was sampled with: over keys and values of the same weights, unless a swap was told to keep older ones.
"""

import difflib
import importlib.util
from pathlib import Path

from broker.errors import ConfigError, HeadwayError
from broker.user_code.roots import ImportRoots
from rollout_workers.config import ENGINES, VLLM_REMEDY, EngineConfig

from .base import Engine


def open_engine(
    config: EngineConfig,
    model_dir: Path,
    *,
    seed: int,
    tells_experts: bool = False,
    sleeps: bool = False,
    roots: ImportRoots | None = None,
) -> Engine:
    """Start the engine `config.kind` on the config.json in `model_dir`; weights come by swap_weights.

    vLLM must know from the start what will be asked of it. `tells_experts`: which experts were chosen; raises
    HeadwayError where it cannot tell. `sleeps`: to leave a GPU's memory to others. `roots`: below which an engine of
    one's own may be imported; by default Headway's own and the working directory's.
    """
    match config.kind:
        case "embedded":
            from .embedded.engine import open_embedded

            return open_embedded(config, model_dir, seed=seed)
        case "vllm":
            if importlib.util.find_spec("vllm") is None:
                raise HeadwayError(f"engine.kind=vllm needs vLLM, which is not installed. {VLLM_REMEDY}")
            from .vllm.start import open_vllm

            return open_vllm(config, model_dir, seed=seed, tells_experts=tells_experts, sleeps=sleeps)
        case path if ":" in path:
            return open_custom(path, config, model_dir, seed=seed, roots=roots or ImportRoots())
        case unknown:
            nearest = difflib.get_close_matches(unknown, ENGINES, n=1, cutoff=0)[0]
            raise ConfigError(
                f"engine.kind={unknown} is unknown: did you mean {nearest}? Known: {', '.join(ENGINES)}, "
                "or package.module:Class"
            )


def open_custom(path: str, config: EngineConfig, model_dir: Path, *, seed: int, roots: ImportRoots) -> Engine:
    """An engine of the user's own, called as Class(config, model_dir, seed=seed). Raises ConfigError."""
    engine: Engine = roots.load(path, "engine.kind")(config, model_dir, seed=seed)
    return engine
