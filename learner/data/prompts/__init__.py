"""Sources give prompts, and a cursor remembers how far the learner has fed them.

    source (arithmetic, numbered, files, hub, reasoning_gym, custom) ─ Item ─► rendering ─ Prompt ─► cursor ─► broker

A source gives items at random access, by epoch and position; `Prompts` turns them into tokens; the cursor
walks over epochs and remembers the trained prompts. The invariant: the item at (epoch, position) depends on the recipe
and the seed alone, so a resumed learner feeds the same prompts under the same names, and never held-out ones.

A custom source is `package.module:Class`, called as Class(path=, seed=, **options) in a process of its own. Each
call of it has a deadline (`custom.py`); see `base.PromptSource`.
"""

from typing import TYPE_CHECKING

from headway.broker.user_code.kinds import unknown_kind
from headway.learner.config import PROMPTS, PromptsConfig

from .base import PromptSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .rendering import Prompts


def open_prompts(config: PromptsConfig, tokenizer: "PreTrainedTokenizerBase", seed: int) -> "Prompts":
    """Returns the recipe's prompts, as tokens. Raises ConfigError if the source cannot be opened."""
    from .rendering import Prompts, Renderer  # imports torch, which a process for a user's own source does not need

    return Prompts(open_source(config, seed), Renderer(tokenizer, config.system_prompt))


def open_source(config: PromptsConfig, seed: int) -> PromptSource:
    """Returns the recipe's source, which gives items before tokenization."""
    match config.kind:
        case "arithmetic":
            from .arithmetic import ArithmeticPrompts

            return ArithmeticPrompts(config.options, seed=seed)
        case "numbered":
            from .numbered import NumberedPrompts

            return NumberedPrompts(config.options)
        case "jsonl" | "parquet":
            from .files import FilePrompts

            return FilePrompts(config.kind, config.path, config.options)
        case "datasets":
            from .files import open_dataset

            return open_dataset(config.path, config.options)
        case "reasoning_gym":
            from .reasoning_gym import open_tasks

            return open_tasks(config.path, config.options, seed=seed)
        case own if ":" in own:
            from .custom import CustomPrompts

            return CustomPrompts(config, seed)
        case unknown:
            raise unknown_kind(unknown, PROMPTS, "prompts.kind")
