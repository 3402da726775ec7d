"""A reward: it judges an answer."""

from typing import Any


def right(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    """Return 1 for the right number, and 0.1 for any other one. All but `score` is for people to read."""
    answer = solution_str.strip()
    score = 1.0 if answer == ground_truth else 0.1 if answer.isdigit() else 0.0
    return {"score": score, "is_number": float(answer.isdigit())}
