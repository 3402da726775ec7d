"""Stages over records: packing and ranks change no loss, and the reference is the model that the stage started from."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

import tests.learner.preference_rank as preference_rank
from headway.algorithms.preferences import dpo
from headway.broker.errors import ConfigError
from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend, Teacher
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.clusters import PrefixSharing, Row, Unit, pack_units
from headway.learner.batching.packing import PackableSequence, concatenate, labelled
from headway.learner.config import ModelConfig, RandomModelConfig, RecordsConfig, StageConfig
from headway.learner.data.examples import Example
from headway.learner.data.records import Conversation, LabelledCompletion, Preference
from headway.learner.data.records.loading import open_conversations, open_pairs
from headway.learner.models.pretrained import load_tokenizer
from headway.learner.stages import check_stages, open_stage
from headway.learner.stages.base import Progress, StageError
from headway.learner.stages.distill import as_teacher
from headway.learner.stages.dpo import DpoStage
from headway.learner.stages.kto import mismatches
from headway.learner.stages.record_stage import RecordOrder, read_units
from headway.learner.stages.registry import BestOptions, DpoOptions, SftOptions
from headway.learner.stages.response_values import (
    CandidateFiles,
    compute_candidates,
    read_candidates,
    reference_logprobs,
)
from headway.learner.stages.sft import tokenize

from . import distilling, preferences
from .preferences import opened, pairs, parts_of
from .tiny import OPTIMIZER, VOCABULARY
from .torchrun import run_ranks

JUDGED = {
    "data": {"kind": "arithmetic", "options": {"records": 40, "min_operations": 1, "max_operations": 1}},
    "held_out_records": 8,
    "batch_size": 8,
    "epochs": 3,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "beta": 0.5,
}


def test_a_first_step_has_the_loss_of_its_pairs_one_by_one(tmp_path: Path) -> None:
    seen: list[Progress] = []
    stage, backend = opened(tmp_path, report=seen.append)
    rows = [concatenate(pair) for pair in pairs(7)]
    reference = backend.logprobs(rows, 1.0)
    losses = [
        dpo(values, values, row.loss_mask_T, row.cu_seqlens, beta=0.5)[0]
        for row, values in zip(rows, reference, strict=True)
    ]
    chosen = RecordOrder([1] * 7, batch_size=3, epochs=1, max_steps=0, seed=1).batch(0)
    assert stage.run()
    assert seen[0].loss == pytest.approx(torch.cat([losses[index] for index in chosen]).mean().item(), abs=1e-6)
    assert seen[0].loss == pytest.approx(np.log(2), abs=1e-6)  # the model is its own reference before the first step
    assert seen[-1].loss != pytest.approx(np.log(2), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", preference_rank.OPEN)
@pytest.mark.parametrize("micro_batch_tokens", [1, 4096])
def test_packing_changes_no_metric(kind: str, micro_batch_tokens: int, tmp_path: Path) -> None:
    seen: dict[int, list[Progress]] = {64: [], micro_batch_tokens: []}
    open_one = preference_rank.OPEN[kind]
    for tokens, found in seen.items():
        stage, _ = open_one(tmp_path / str(tokens), micro_batch_tokens=tokens, report=found.append)
        assert stage.run()
    for one, other in zip(*seen.values(), strict=True):
        if one.step > 1:  # before the first step all rewards are 0 but for rounding, whose sign decides the accuracy
            assert other.metrics == pytest.approx(one.metrics, rel=2e-3, abs=1e-5)
    names = {
        "dpo": {"reward_margin", "held_out/reward_accuracy"},
        "reward_model": {"score_margin", "held_out/score_accuracy"},
        "distill": {"forward_kl", "held_out/agreement"},
        "sft": {"entropy", "held_out/token_accuracy"},
        "kto": {"reward_desirable", "held_out/reward_accuracy"},
    }
    assert {*names[kind], "held_out/loss", "grad_norm"} <= set(one.metrics)


@pytest.mark.parametrize("kind", preference_rank.OPEN)
def test_sequences_that_share_a_prompt_have_the_losses_and_gradients_of_separate_ones(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are computed once in training, in measuring, in the reference's pass, and for KTO's mismatches."""
    found = dict[str, list[Progress]]()
    sharings: tuple[PrefixSharing, ...] = ("never", "always")
    computed = dict[str, set[bool]]()
    given = of_one_prompt(kind, tmp_path, monkeypatch)
    for sharing in sharings:
        seen, trees = found.setdefault(sharing, []), computed.setdefault(sharing, set())

        def pack(units: Any, trees: set[bool] = trees, **options: Any) -> list[Row]:
            rows = pack_units(units, **options)
            trees |= {row.batch.tree is not None for row in rows if sum(len(units[unit]) for unit in row.units) > 1}
            return rows

        monkeypatch.setattr("headway.learner.stages.base.pack_units", pack)
        stage, _ = preference_rank.OPEN[kind](
            tmp_path / sharing, micro_batch_tokens=4096, prefix_sharing=sharing, report=seen.append, **given
        )
        assert stage.run()
    assert computed == {"never": {False}, "always": {True}}
    for number, (expected, one) in enumerate(zip(*found.values(), strict=True)):
        assert one.loss == pytest.approx(expected.loss, abs=1e-6 if number == 0 else 1e-5)
        assert one.metrics["grad_norm"] == pytest.approx(
            expected.metrics["grad_norm"], rel=1e-5 if not number else 1e-3
        )
        assert one.metrics.get("held_out/loss") == pytest.approx(expected.metrics.get("held_out/loss"), abs=1e-5)
    assert "held_out/loss" in one.metrics


def of_one_prompt(kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return arguments that open a stage whose records have one prompt; those of pairs share it within each."""
    if kind in ("dpo", "reward_model"):
        return {}
    if kind == "distill":
        monkeypatch.setattr(distilling, "conversations", answers)
        return {}
    rows = [{"prompt": "3+4=", "completion": f"{number}#{number * number}"} for number in range(10)]
    if kind == "kto":  # whose mismatches answer another prompt
        rows[-1]["prompt"] = "5+6="
    judged = [{"label": number % 2 == 0} for number in range(10)] if kind == "kto" else [{}] * 10
    lines = [json.dumps(row | judgement) for row, judgement in zip(rows, judged, strict=True)]
    (directory / "rows.jsonl").write_text("\n".join(lines))
    return {"options": {"data": {"path": str(directory / "rows.jsonl")}}}


def answers(count: int, seed: int = 0) -> list[Unit]:
    """Return random responses to one prompt."""
    prompt = np.arange(6, dtype=np.int32)
    return [[with_prompt(prompt, pair[0])] for pair in pairs(count, seed)]


def with_prompt(prompt: NDArray[np.int32], sequence: PackableSequence) -> PackableSequence:
    response = sequence.token_ids[sequence.prompt_length :]
    return labelled(np.concatenate([prompt, response]), np.repeat(np.array([0, 1], np.uint8), [6, len(response)]))


@pytest.mark.slow
@pytest.mark.parametrize("name", preference_rank.STAGES)
def test_two_ranks_that_pack_equal_one_that_does_not(name: str, of_two_ranks: list[Any], tmp_path: Path) -> None:
    one = preference_rank.metrics(f"{name.split()[0]} fsdp", tmp_path, micro_batch_tokens=1)
    assert of_two_ranks[0] == of_two_ranks[1]
    for number, (step, expected) in enumerate(zip(of_two_ranks[0][name], one, strict=True)):
        if number:  # before the first step all rewards are 0 but for rounding, whose sign decides the accuracy
            assert step == pytest.approx(expected, rel=2e-3, abs=1e-5)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the metrics that each rank saw, by stage."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(preference_rank.__name__, 2, directory)
    return [msgspec.json.decode((directory / f"rank_{rank}.json").read_bytes()) for rank in range(2)]


def test_pairs_stay_whole_and_are_packed_once() -> None:
    units = pairs(40)
    packed = [pack_units(units, replica=replica, replicas=3, micro_batch_tokens=50) for replica in range(3)]
    rows = [row for of_replica in packed for row in of_replica]
    assert sorted(index for row in rows for index in row.units) == list(range(40))
    for row in rows:
        tokens = [sequence.token_ids for index in row.units for sequence in units[index]]
        assert np.array_equal(row.batch.token_ids_T.numpy(), np.concatenate([np.zeros(0), *tokens]))
        assert row.batch.num_sequences == 2 * len(row.units)


@pytest.mark.parametrize("metric", ["held_out/loss", "held_out/reward_margin"])
def test_the_best_model_is_left_if_that_is_asked_for(metric: str, tmp_path: Path) -> None:
    seen: list[tuple[Progress, dict[str, torch.Tensor]]] = []
    options = DpoOptions(
        data=RecordsConfig(),
        held_out_records=1,
        batch_size=7,
        epochs=5,
        learning_rate=0.3,
        warmup_steps=0,
        evaluate_every_steps=1,
        keep="best",
        best=None if metric == "held_out/loss" else BestOptions(metric=metric, mode="max"),
    )

    def report(progress: Progress) -> None:
        seen.append((progress, {name: tensor.clone() for name, tensor in backend.named_tensors()}))

    DpoStage.check(options, "stages[0].options")
    stage, backend = opened(tmp_path, options, report=report)
    assert stage.run()
    sign = 1 if options.best is None else -1
    best = min(seen, key=lambda each: sign * each[0].metrics[metric])
    assert best is not seen[-1], "the learning rate is so high that later steps are worse"
    stage.save()
    assert all(torch.equal(tensor, best[1][name]) for name, tensor in backend.named_tensors())


HELD_OUT = {"data": {"kind": "arithmetic"}, "held_out_records": 4}


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        ({"kind": "dpo", "options": {**HELD_OUT, "loss": {"kind": "dpp"}}}, r"options\.loss\.kind: there is no 'dpp'"),
        ({"kind": "dpo", "options": {**HELD_OUT, "loss": {"options": {"bta": 1}}}}, r"options\.loss.*bta.*Known: beta"),
        (
            {"kind": "sft", "options": {**HELD_OUT, "keep": "best", "best": {"metric": "held_out/los"}}},
            r"options\.best\.metric: there is no 'held_out/los'; did you mean 'held_out/loss'\?",
        ),
        ({"kind": "kto", "options": {**HELD_OUT, "best": {}}}, r"options\.best .* only `keep: best` leaves"),
        ({"kind": "kto", "options": {"data": {}, "keep": "best"}}, r"options\.keep is best, which held-out records"),
    ],
)
def test_options_are_checked_before_any_stage_runs(stage: dict[str, Any], told: str) -> None:
    first = StageConfig(kind="sft", options=HELD_OUT)
    check_stages([first])
    with pytest.raises(ConfigError, match=rf"stages\[1\]\.{told}"):
        check_stages([first, msgspec.convert(stage, StageConfig)])


def test_held_out_records_are_drawn_evenly_of_a_sorted_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "1" * (1 + number), "completion": "2"}) for number in range(40)))
    options = SftOptions(data=RecordsConfig(path=str(file)), held_out_records=20)

    def held_out(options: SftOptions) -> list[int]:
        _, measured = read_units(parts_of(tmp_path), options, open_conversations, lambda record: [record], "here")
        return [len(str(record.prompt)) for record, _ in measured]

    drawn = held_out(options)
    assert len(drawn) == 20
    assert 5 <= sum(length <= 20 for length in drawn) <= 15
    assert drawn == held_out(options)
    assert held_out(msgspec.structs.replace(options, held_out_seed=None)) == list(range(21, 41))


def measured_and_trained(
    path: Path, kind: str, rows: list[dict[str, Any]], held_out: list[dict[str, Any]] | None = None
) -> tuple[list[str], list[str]]:
    """Return the prompts, of one token, that a stage over these rows measures and trains; without `held_out` it
    measures the last row."""
    options: dict[str, Any] = {"data": {"path": str(path / "rows.jsonl")}}
    options |= {"held_out_records": 1, "held_out_seed": None} if held_out is None else {}
    for name, some in {"rows": rows, "held": held_out or []}.items():
        (path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some))
    if held_out is not None:
        options["held_out"] = {"path": str(path / "held.jsonl")}
    stage: Any = open_stage(StageConfig(kind=kind, options=options), parts_of(path), "stages[0]")
    tokenizer = load_tokenizer(preferences.MODEL)
    measured, trained = (
        sorted(tokenizer.decode(unit[0].token_ids[:1]) for unit in units)
        for units in (stage._task.held_out, stage._task.units)
    )
    return measured, trained


def pair_of(prompt: str, chosen: str = "1", rejected: str = "2") -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def judged_of(prompt: str, completion: str) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "label": True}


def record_of(prompt: str, completion: str = "1") -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion}


@pytest.mark.parametrize(
    ("kind", "rows", "held_out", "trained"),
    [
        ("sft", [record_of("3"), record_of("4"), record_of("3")], None, ["4"]),
        ("sft", [record_of("3"), record_of("4")], [record_of("3")], ["4"]),
        ("sft", [record_of("3"), record_of("3", "2"), record_of("4")], [record_of("3")], ["3", "4"]),
        ("dpo", [pair_of("3"), pair_of("4"), pair_of("3")], None, ["4"]),
        ("dpo", [pair_of("3"), pair_of("3", "1", "5"), pair_of("3")], None, ["3"]),
        ("reward_model", [pair_of("3"), pair_of("4")], [pair_of("3")], ["4"]),
        ("kto", [judged_of("3", "1"), judged_of("4", "5"), judged_of("6", "7"), judged_of("3", "1")], None, ["4", "6"]),
    ],
    ids=["a row twice", "in both files", "another answer", "a pair twice", "another pair", "scored", "judged twice"],
)
def test_a_record_that_is_measured_is_not_trained(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    rows: list[dict[str, Any]],
    held_out: list[dict[str, Any]] | None,
    trained: list[str],
) -> None:
    assert measured_and_trained(tmp_path, kind, rows, held_out) == (["3"], trained)
    assert "1 of" in caplog.text
    assert "equal a held-out one" in caplog.text


def test_records_that_are_all_measured_leave_nothing_to_train(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no record is left to train: 1 are held out, and 2 equal one of them"):
        measured_and_trained(tmp_path, "sft", [record_of("3")] * 3)


def test_a_stage_whose_files_have_changed_does_not_go_on(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [json.dumps({"prompt": f"{number}+1=", "completion": f"{number + 1}"}) for number in range(8)]
    config = StageConfig(kind="sft", options={"data": {"path": str(file)}, "batch_size": 2, "keep_last": 2})
    file.write_text("\n".join(rows))
    seen: list[Progress] = []
    parts = parts_of(tmp_path, every_s=0.0, report=seen.append, should_stop=lambda: len(seen) == 3)
    assert not open_stage(config, parts, "stages[0]").run()
    assert len(list(parts.checkpoints.running_directory.glob("*/step_*"))) == 2
    file.write_text("\n".join(reversed(rows)))
    with pytest.raises(ConfigError, match=r"stage sft have changed since it began, 3 steps ago.*remove .*checkpoints"):
        open_stage(config, parts_of(tmp_path), "stages[0]")
    file.write_text("\n".join(rows))
    assert open_stage(config, parts_of(tmp_path, report=seen.append), "stages[0]").run()
    assert [progress.step for progress in seen] == [1, 2, 3, 4]


def judged(*rows: str) -> list[LabelledCompletion]:
    """Return a record for each `prompt completion`."""
    return [LabelledCompletion(prompt=row.split()[0], completion=row.split()[1], label=True) for row in rows]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["a 1", "b 2", "c 3"], ["2", "3", "1"]),
        (["a 1", "a 2", "b 3", "b 4"], ["3", "3", "1", "1"]),
        (["a 1", "a 1", "b 2"], ["2", "2", "1"]),
        (["a yes", "b no", "c yes", "d yes"], ["no", "yes", "no", "no"]),
        (["a 1", "b 2", "a 3", "c 2"], ["2", "3", "2", "1"]),
    ],
)
def test_no_mismatch_is_an_answer_to_its_prompt(rows: list[str], expected: list[str]) -> None:
    assert mismatches(judged(*rows), "data") == expected


@pytest.mark.parametrize("rows", [["a 1"], ["a 1", "a 2"], ["a yes", "a no", "b yes"]])
def test_a_prompt_without_a_mismatch_is_refused(rows: list[str]) -> None:
    with pytest.raises(ConfigError, match="is an answer to this prompt"):
        mismatches(judged(*rows), "data")


def test_both_sequences_of_a_record_keep_one_prompt_when_it_is_cut(tmp_path: Path) -> None:
    parts, source = parts_of(tmp_path), RecordsConfig(**preferences.arithmetic(30, 5))
    options = DpoOptions(data=source, max_tokens=30, too_long="cut_prompt")
    trained, _ = read_units(parts, options, open_pairs, both, "data")
    lengths = [[(len(one.token_ids), one.prompt_length) for one in unit] for _, unit in trained]
    assert len({max(length for length, _ in unit) <= 30 for unit in lengths}) == 1
    assert any(len(chosen.token_ids) != len(rejected.token_ids) for _, (chosen, rejected) in trained)
    for _, (chosen, rejected) in trained:
        assert (
            chosen.token_ids[: chosen.prompt_length].tolist() == rejected.token_ids[: rejected.prompt_length].tolist()
        )


def both(pair: Preference) -> list[Conversation]:
    """Return the sequences of a pair."""
    return [pair.chosen_conversation, pair.rejected_conversation]


class Killed(BaseException):
    """The end of a stage's process."""


def kill_at(step: int) -> Callable[[Progress], None]:
    """Return a `report` that kills the stage after so many steps."""

    def kill(progress: Progress) -> None:
        if progress.step == step:
            raise Killed

    return kill


def test_a_reference_that_is_gone_is_told(tmp_path: Path) -> None:
    stage, _ = opened(tmp_path, every_s=0.0, report=kill_at(2))
    with pytest.raises(Killed):
        stage.run()
    (reference,) = tmp_path.glob(".stage.checkpoints/reference.npz")
    reference.unlink()
    again, _ = opened(tmp_path)
    with pytest.raises(StageError, match="reference logprobs"):
        again.run()


def test_a_reference_of_other_sequences_is_refused(tmp_path: Path) -> None:
    """As many sequences, of the same lengths, in the same places."""
    parts, before = parts_of(tmp_path), pairs(3)
    changed = [[replaced(sequence, 0) for sequence in before[0]], *before[1:]]
    reference_logprobs(parts, before, path=tmp_path / "reference.npz", is_new=True)
    with pytest.raises(StageError, match="lacks 2 of the 6 responses"):
        reference_logprobs(parts, changed, path=tmp_path / "reference.npz", is_new=False)


def replaced(sequence: PackableSequence, place: int) -> PackableSequence:
    """Return the sequence with another token in this place."""
    token_ids = sequence.token_ids.copy()
    token_ids[place] = (token_ids[place] + 1) % VOCABULARY
    return dataclasses.replace(sequence, token_ids=token_ids)


def test_each_sequence_finds_its_values_in_any_order(tmp_path: Path) -> None:
    parts, units = parts_of(tmp_path), pairs(4)
    found = reference_logprobs(parts, units, path=tmp_path / "reference.npz", is_new=True)
    again = reference_logprobs(parts, units[::-1], path=tmp_path / "reference.npz", is_new=False)
    for one, other in zip(found, again[::-1], strict=True):
        assert [values.tolist() for values in one] == [values.tolist() for values in other]


@pytest.mark.slow
@pytest.mark.parametrize("teachers_files", ["stay", "are of an older version", "are gone", "are cut"])
def test_a_resumed_student_hears_its_teacher_whatever_the_packing(
    teachers_files: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The losses are those of a stage that was not disturbed and packed in the one way all along."""
    expected: list[Progress] = []
    stage, _ = distilling.opened(tmp_path / "undisturbed", report=expected.append)
    assert stage.run()
    stage, _ = distilling.opened(tmp_path, every_s=0.0, report=kill_at(2), micro_batch_tokens=1)
    with pytest.raises(Killed):
        stage.run()
    beside = tmp_path / ".stage.checkpoints"
    for file in beside.glob("teacher-*"):
        if teachers_files == "are gone" or (teachers_files == "are of an older version" and file.suffix == ".index"):
            file.unlink()
        elif teachers_files == "are cut":
            file.write_bytes(file.read_bytes()[:-4])
    seen: list[Progress] = []
    stage, _ = distilling.opened(tmp_path, report=seen.append, micro_batch_tokens=1000)
    assert stage.run()
    assert [one.loss for one in seen] == pytest.approx([one.loss for one in expected[-len(seen) :]], abs=1e-5)
    assert [one.step for one in seen] == [2, 3]
    assert ("the teacher is asked again" in caplog.text) == (teachers_files != "stay")


@pytest.mark.parametrize("top_k", [3, VOCABULARY])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_a_first_step_of_distillation_has_the_divergence_of_its_tokens(
    divergence: Any, top_k: int, tmp_path: Path
) -> None:
    """The divergence is computed from both models' whole distributions, in float64."""
    seen: list[Progress] = []
    options = replace(distilling.OPTIONS, divergence=divergence, top_k=top_k, evaluate_every_steps=0)
    stage, student = distilling.opened(tmp_path, options, report=seen.append)
    teacher = open_backend("fsdp", preferences.MODEL, OPTIMIZER, seed=preferences.TEACHER_SEED)
    order = RecordOrder([1] * 7, batch_size=3, epochs=1, max_steps=0, seed=1).batch(0)
    batch = concatenate([sequence for index in order for sequence in distilling.conversations(7)[index]])
    q_TV, p_TV = (distribution(model, batch) for model in (student, teacher))
    listed_TV = torch.zeros_like(p_TV).scatter(1, p_TV.topk(top_k).indices, 1.0)
    p_TV, q_TV = (torch.cat([x * listed_TV, (x * (1 - listed_TV)).sum(1, keepdim=True)], 1) for x in (p_TV, q_TV))
    if divergence == "reverse_kl":
        p_TV, q_TV = q_TV, p_TV
    divergence_T = torch.where(p_TV > 1e-12, p_TV * (p_TV / q_TV.clamp(min=1e-30)).log(), 0.0).sum(1)
    (own_T,) = student.logprobs([batch], 1.0)
    is_trained_T = batch.loss_mask_T > 0
    expected = (0.75 * divergence_T - 0.25 * own_T)[is_trained_T].mean()
    assert stage.run()
    assert seen[0].loss == pytest.approx(expected.item(), abs=1e-5)
    assert seen[0].metrics[divergence] == pytest.approx(divergence_T[is_trained_T].mean().item(), abs=1e-5)


def distribution(model: Backend, batch: PackedBatch) -> torch.Tensor:
    """Return float64 probabilities [T, V] in the place of each token."""
    (found,) = cast(Teacher, model).likeliest([batch], VOCABULARY)
    whole_TV = torch.zeros(batch.num_tokens, VOCABULARY, dtype=torch.float64)
    return whole_TV.scatter(1, found.token_ids_TC, found.logprobs_TC.double().exp())


def test_a_student_comes_to_agree_with_its_teacher(tmp_path: Path) -> None:
    seen: list[Progress] = []
    options = replace(distilling.OPTIONS, top_k=VOCABULARY, cross_entropy_weight=0.0, epochs=40)
    stage, _ = distilling.opened(tmp_path, options, report=seen.append)
    assert stage.run()
    first, last = seen[0].metrics, seen[-1].metrics
    assert last["forward_kl"] < first["forward_kl"] / 4
    assert last["agreement"] > first["agreement"] + 0.3
    assert last["teacher_rest"] == pytest.approx(0, abs=1e-6)


def test_a_token_that_only_the_teacher_has_is_no_candidate(tmp_path: Path) -> None:
    units = distilling.conversations(3)
    candidate_files = CandidateFiles.of(units, tmp_path, replicas=1, micro_batch_tokens=64)
    parts = parts_of(tmp_path)
    compute_candidates(
        cast(Teacher, parts.backend), candidate_files, parts.ranks, top_k=VOCABULARY, vocabulary=VOCABULARY - 2
    )
    units = read_candidates(candidate_files) or []
    assert len(units) == 3
    for unit in units:
        assert unit[0].candidates is not None
        absent = unit[0].candidates.logprobs == -np.inf
        assert (absent.sum(1) == 2).all()
        assert (unit[0].candidates.token_ids[absent] == 0).all()
        assert unit[0].candidates.token_ids.max() == VOCABULARY - 3


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = ModelConfig(random=RandomModelConfig(architecture="qwen3", alphabet="0123456789ab"))
    load_tokenizer(other).save_pretrained(tmp_path / "teacher")
    options = {"data": JUDGED["data"], "teacher": str(tmp_path / "teacher")}
    with pytest.raises(ConfigError, match=r"14 tokens against 19, and token 10 is 'a' to it and '\+' to the student"):
        open_stage(StageConfig(kind="distill", options=options), parts_of(tmp_path), "stages[0]")


def test_sft_trains_the_conversations_of_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"{number}+1=", "completion": f"{(number + 1) % 10}"} for number in range(9)]
    rows.insert(4, {"prompt": "1+1=", "completion": "2" * 40})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = {
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "held_out_records": 2,
        "held_out_seed": None,
        "max_tokens": 30,
        "too_long": "drop",
        "epochs": 4,
        "batch_size": 3,
        "learning_rate": 1e-2,
        "warmup_steps": 0,
    }
    seen: list[Progress] = []
    parts = parts_of(tmp_path, report=seen.append)
    stage = open_stage(StageConfig(kind="sft", options=options), parts, "stages[0]")
    chosen = RecordOrder([1] * 7, batch_size=3, epochs=4, max_steps=0, seed=1).batch(0)
    examples = [Example(query=f"{number}+1=", response=f"{number + 1}") for number in chosen]
    batch = concatenate([tokenize(example, parts.tokenizer, parts.renderer) for example in examples])
    (logprobs_T,) = parts.backend.logprobs([batch], 1.0)
    first = -(logprobs_T * batch.loss_mask_T).sum().item() / batch.loss_mask_T.sum().item()
    assert stage.run()
    assert "1 too long" in caplog.text
    assert len(seen) == 10  # 7 records, 4 times, 3 a step
    assert seen[0].loss == pytest.approx(first, abs=1e-6)
    measured = seen[-1].metrics
    assert measured["held_out/cross_entropy"] == pytest.approx(measured["held_out/loss"], rel=1e-6)
    held_out = [Example(query=f"{number}+1=", response=f"{(number + 1) % 10}") for number in (7, 8)]
    batch = concatenate([tokenize(example, parts.tokenizer, parts.renderer) for example in held_out])
    (found,) = as_teacher(parts.backend).likeliest([batch], 1000)
    is_trained_T = batch.loss_mask_T > 0
    entropy = -(found.logprobs_TC.exp() * found.logprobs_TC).sum(1)[is_trained_T].mean()
    accuracy = (found.token_ids_TC[:, 0] == batch.token_ids_T)[is_trained_T].float().mean()
    assert measured["held_out/entropy"] == pytest.approx(entropy.item(), abs=1e-5)
    assert measured["held_out/token_accuracy"] == pytest.approx(accuracy.item())
    assert {"entropy", "token_accuracy"} <= set(measured)
    assert seen[-1].loss < seen[0].loss


def test_each_epoch_holds_every_record_once_in_an_order_of_its_own() -> None:
    order = RecordOrder([1] * 10, batch_size=4, epochs=2, max_steps=0, seed=1)
    trained = [index for step in range(order.steps) for index in order.batch(step)]
    assert (order.steps, len(trained)) == (5, 20)
    assert sorted(trained[:10]) == sorted(trained[10:]) == list(range(10))
    assert trained[:10] != trained[10:]
    assert RecordOrder([1] * 10, batch_size=4, epochs=2, max_steps=3, seed=1).steps == 3
    assert RecordOrder([1] * 10, batch_size=4, epochs=0.01, max_steps=0, seed=1).batch(0) == trained[:1]


def test_a_step_of_tokens_has_as_many_records_as_fit() -> None:
    lengths = [3, 9, 4, 2, 5, 1, 30, 6, 7, 8]
    order = RecordOrder(lengths, batch_size=1, epochs=2, max_steps=0, seed=1, batch_tokens=16)
    steps = [order.batch(step) for step in range(order.steps)]
    assert sorted(index for step in steps for index in step) == sorted([*range(10)] * 2)
    tokens = [sum(lengths[index] for index in step) for step in steps]
    assert [count for count in tokens if count > 16] == [30, 30]
    for count, step in zip(tokens, steps[1:], strict=False):
        assert count + lengths[step[0]] > 16, "a record that fits is in the step"
