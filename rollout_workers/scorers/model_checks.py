"""Reads the files of a scorer's model, and says what is wrong with them."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import ScoringModel, UnfitModelError

ENCODER_HEADS = ("classifier", "classification_head")
"""The heads of the sequence classifiers that transformers makes of encoders; those of causal models are `score`."""


def check_same_tokenizer(path: str, policy: Path, key: str) -> None:
    """Raise UnfitModelError unless a token id means the same to the scorer's model as to the policy. A directory
    without a tokenizer is taken at its word."""
    from transformers import AutoTokenizer

    ours = AutoTokenizer.from_pretrained(policy, trust_remote_code=False).get_vocab()
    if Path(path).is_dir() and not (Path(path) / "tokenizer_config.json").exists():
        return
    with reading(path, key):
        theirs = AutoTokenizer.from_pretrained(path, trust_remote_code=False).get_vocab()
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            raise UnfitModelError(
                f"{key}: {path} has another tokenizer than the policy: {token!r} is token {number} of the policy and"
                f" {theirs.get(token, 'no token')} there. A scorer is given the policy's tokens, so take a model that"
                " was trained from one of the policy's family."
            )


def shared_tokens(vocabulary: int, policy: Path | None) -> int:
    """Return how many token ids a teacher of `vocabulary` ids and the policy both have. Of the policy's directory only
    the configuration need be there."""
    from transformers import AutoConfig

    if policy is None:
        return vocabulary
    known = AutoConfig.from_pretrained(policy, trust_remote_code=False).get_text_config().vocab_size
    return min(vocabulary, int(known))


def longest_of(config: Any) -> int:
    """Return the most tokens that the positions of the model with this `config` allow."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 30)


def check_labels(config: Any, asked: ScoringModel) -> None:
    """Raise UnfitModelError unless a reward model's `config` has one label."""
    if config.num_labels != 1:
        raise UnfitModelError(
            f"{asked.key}: {asked.path} has {config.num_labels} labels; a reward model has one (num_labels: 1)."
        )


def check_reads_to_the_end(path: str, key: str) -> None:
    """Raise UnfitModelError for a sequence classifier of an encoder, whose head reads the first token."""
    with reading(path, key):
        names = list(_stored_names(path))
    head = next((name for name in names if name.split(".")[0] in ENCODER_HEADS), None)
    if head is None or any(name.split(".")[-2:] == ["score", "weight"] for name in names):
        return
    raise UnfitModelError(
        f"{key}: {path} is a classifier of an encoder ({head}): it scores at its first token, and reads text in tokens"
        " of its own. A scorer is given the policy's tokens and scores at the last one. Take a classifier with a score"
        " head that was trained from a causal model of the policy's family, as a reward_model stage leaves it. A reward"
        " function of your own, which is given the text, can ask this one: rewards: [{kind: my_rewards:function}]."
    )


def check_head(config: Any, asked: ScoringModel) -> None:
    """Raise UnfitModelError unless the files of the model with this `config` have the weights of its head."""
    if asked.kind == "teacher" and config.get_text_config().tie_word_embeddings:
        return
    head = "score" if asked.kind == "reward_model" else "lm_head"
    with reading(asked.path, asked.key):
        names = _stored_names(asked.path)
    if not any(name.split(".")[-2:] == [head, "weight"] for name in names):
        raise no_weights(asked, [f"{head}.weight"])


def _stored_names(path: str) -> Iterable[str]:
    """Return the names of the weights in a directory, or of a hub id."""
    from safetensors import safe_open
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file

    try:
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME)
    except OSError:  # the weights are in one file
        with safe_open(cached_file(path, SAFE_WEIGHTS_NAME), "np") as file:
            return list(file.keys())
    return list(json.loads(Path(str(index)).read_text())["weight_map"])


def no_weights(asked: ScoringModel, missing: Sequence[str]) -> UnfitModelError:
    """Return the error for a model without these weights."""
    head = "a sequence classifier" if asked.kind == "reward_model" else "a causal language model"
    return UnfitModelError(
        f"{asked.key}: {asked.path} has no weights {', '.join(missing[:3])} and is not {head} that was trained."
    )


@contextmanager
def reading(path: str, key: str) -> Iterator[None]:
    """Turn what libraries raise for the files of the model in `path` into UnfitModelError, which names `key`."""
    if path.startswith(("/", ".", "~")) and not Path(path).is_dir():
        raise UnfitModelError(f"{key}: there is no directory {path}. Give the directory of a model, or a hub id.")
    try:
        yield
    except (OSError, ValueError) as error:
        raise UnfitModelError(f"{key}: {path} cannot be loaded: {' '.join(str(error).split())[:500]}") from error
