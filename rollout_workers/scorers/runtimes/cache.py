"""The memory that a runtime reserves for keys and values."""

BLOCK_TOKENS = 256
"""At least the tokens of a block of any runtime's cache. One block is never used, and one is not full."""


def cache_tokens(batch_tokens: int, most_tokens: int) -> int:
    """Return the number of tokens whose keys and values a runtime with a cache holds: those of a batch, and of the
    longest request besides, which may be a batch of its own."""
    return batch_tokens + most_tokens + 2 * BLOCK_TOKENS
