"""Prompts, and the right length and tokens of each of their samples for each weight version.

Nothing of it is stored: engines compute it, and the learner computes it again and compares.
"""

import random
import zlib

import numpy as np
from numpy.typing import NDArray

from headway.broker.schema import Prompt, Trajectory, TrajectoryId, VersionSpan, WeightVersion
from headway.learner.data.prompts.cursor import place_of

from .user_code import text_of

ALPHABET = "0123456789[]?"
"""Digits, the marks of a tool call, and what stands for a failed one."""
STOP = len(ALPHABET) + 1
"""The tokenizer's end token, which follows its padding."""
VOCABULARY = 100_000
"""A size of more than 16 bits."""
LONGEST = 200
_MEDIAN_LENGTH, _SPREAD = 24.0, 0.7
WEIGHTS, OVERWRITTEN_WEIGHTS = "weights", "overwritten weights"
"""The names of the one tensor: of the trial's run, and of the run whose name it has taken."""
SCORER = "reward_model"
"""The name of the reward model, where the trial has one."""
ROUNDING = 1e-6
OF_ANOTHER_RUN = "sampled by another run's weights"
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def response_length(tid: TrajectoryId) -> int:
    """Return the length with its stop token; most are short, a few ten times as long."""
    drawn = random.Random(str(tid)).lognormvariate(0.0, _SPREAD)
    return max(1, min(LONGEST, round(_MEDIAN_LENGTH * drawn)))


def response_tokens(
    tid: TrajectoryId, start: int, end: int, version: WeightVersion, weights: str = WEIGHTS
) -> NDArray[np.int32]:
    """Return the tokens that `version` of the weights of this name samples at the places [start, end)."""
    key = zlib.crc32(f"{tid} {version} {weights}".encode())
    tokens = _mixed(key, np.arange(start, end))
    last = response_length(tid) - 1
    if start <= last < end:
        tokens[last - start] = STOP
    return tokens


def logprobs_of(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the logprobs of the sampled tokens, which depend on the tokens alone."""
    return -(1 + tokens % 997).astype(np.float32) / np.float32(997)


def scores_of(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the answer of the reward model to a response: [1]."""
    return np.array([zlib.crc32(tokens.astype("<i4").tobytes()) % 997 / 997], np.float32)


def what_is_wrong(prompt: Prompt, trajectory: Trajectory) -> str:
    """Return '', or the difference between the sample and an engine's."""
    tid, spans = trajectory.tid, trajectory.spans
    if len(trajectory.response_tokens) != response_length(tid):
        return f"{len(trajectory.response_tokens)} tokens where {response_length(tid)} were generated"
    if prompt.group != tid.group or prompt.text != text_of(place_of(tid.group)[1]):
        return "the prompt is another group's"
    if trajectory.prompt_tokens.tolist() != prompt.token_ids:
        return "it continues another prompt"
    made = np.concatenate([response_tokens(tid, span.start, span.end, span.version) for span in spans])
    if any(_is_of_another_run(trajectory, span) for span in spans):
        return OF_ANOTHER_RUN
    if not np.array_equal(trajectory.response_tokens, made):
        return f"token {int(np.argmin(trajectory.response_tokens == made))} was not sampled for this place"
    if not np.array_equal(trajectory.behavior_logprobs, logprobs_of(made)):
        return "the logprobs are those of other tokens"
    score = trajectory.rewards.get(SCORER)
    if score is not None and abs(score - float(scores_of(made)[0])) > ROUNDING:
        return "the reward model's score is that of another response"
    return ""


def _is_of_another_run(trajectory: Trajectory, span: VersionSpan) -> bool:
    tokens = trajectory.response_tokens[span.start : span.end]
    ours, others = (
        response_tokens(trajectory.tid, span.start, span.end, span.version, weights)
        for weights in (WEIGHTS, OVERWRITTEN_WEIGHTS)
    )
    return not np.array_equal(tokens, ours) and np.array_equal(tokens, others)


def _mixed(key: int, places: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return one number above STOP and below VOCABULARY for each place (splitmix64)."""
    bits = places.astype(np.uint64) + np.uint64(key << 20)
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_A
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_B
    return (STOP + 1 + (bits ^ (bits >> np.uint64(31))) % np.uint64(VOCABULARY - STOP - 1)).astype(np.int32)
