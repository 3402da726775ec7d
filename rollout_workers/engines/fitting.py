"""Engines run as many requests at a time as their KV cache holds, where the recipe leaves the number open."""

import logging

log = logging.getLogger(__name__)


def fitting_requests(engine: str, most: int, cache_tokens: int | None, max_model_len: int) -> int:
    """Return how many requests fit the KV cache of an `engine` that was started for `most`; `cache_tokens`: the tokens
    that it holds; None: the engine does not say.

    A request that grows to the longest length has half of it on average, and requests are at all stages of their lives.
    Where nearly all are long at the same time, the engine sets some aside and computes their caches anew later.
    """
    if cache_tokens is None:
        log.info("%s takes %d requests at a time; it does not say what its KV cache holds", engine, most)
        return most
    fitting = max(1, min(most, 2 * cache_tokens // max_model_len))
    log.info(
        "%s takes %d requests at a time: its KV cache holds %d tokens, a request half of engine.max_model_len=%d on"
        " average, and the engine was started for %d",
        engine,
        fitting,
        cache_tokens,
        max_model_len,
        most,
    )
    return fitting
