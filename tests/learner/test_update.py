"""One batch becomes the same update, however many ranks share it."""

import math
from pathlib import Path

import msgspec
import pytest

from headway.learner.batching.packing import PackableSequence
from headway.learner.objective.update import split
from tests.learner import update_rank
from tests.learner.tiny import VOCABULARY, sequences
from tests.learner.torchrun import run_ranks


@pytest.mark.slow
def test_ranks_agree_even_where_one_has_no_sequence(tmp_path: Path) -> None:
    alone, others = update_rank.all_updates(), update_rank.other_updates("fsdp")
    run_ranks(update_rank.__name__, 2, tmp_path)
    for rank in range(2):
        shared = msgspec.json.decode((tmp_path / f"updates_{rank}.json").read_bytes())
        assert shared["fsdp"] == [pytest.approx(update, rel=1e-4, abs=1e-6) for update in alone]
        assert shared["megatron"] == [pytest.approx(update, rel=2e-3, abs=1e-5) for update in others]
    assert [update["grad_norm"] > 0 for update in others] == [True, True, False, *[True] * 6]
    assert all("top_k_reverse_kl" in update for update in others[3:5])
    assert all(update["value_grad_norm"] > 0 for update in others[5:7])
    assert all(0 < update["entropy"] <= math.log(VOCABULARY) for update in others[7:])


@pytest.mark.parametrize(("count", "parts"), [(8, 1), (8, 4), (7, 3), (2, 5)])
def test_a_batch_is_split_into_runs_without_loss(count: int, parts: int) -> None:
    whole: list[PackableSequence] = sequences([5] * count)
    runs = split(whole, parts)
    assert [one for run in runs for one in run] == whole
    assert all(runs)
    assert len(runs) == min(parts, count)
