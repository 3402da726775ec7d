"""The race with verl: its settings, conversations and figures. verl itself is not needed."""

import json
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from pyarrow import parquet

from benchmarks.peers import of_verl
from benchmarks.peers.race import SHORT, TASKS, Race
from headway.learner.data.prompts import open_source
from headway.learner.models.pretrained import load_model, load_tokenizer
from tests.broker.topologies import wait_until
from tests.learner.tiny import model_config
from tests.peers.races import race_in

ROOT = Path(__file__).parents[2]


def test_verl_trains_as_many_samples_in_as_many_updates(tmp_path: Path) -> None:
    recipe, overrides = msgspec.structs.astuple(TASKS[SHORT]["cuda"])
    race = race_in(tmp_path, *overrides, "optimizer.max_grad_norm=0.5", recipe=recipe, gpus=2)
    one = dict(override.split("=", 1) for override in of_verl.overrides_of(race, tmp_path))
    assert (one["data.train_batch_size"], one["actor_rollout_ref.rollout.n"]) == ("32", "16")
    assert one["actor_rollout_ref.actor.ppo_mini_batch_size"] == "8"
    assert one["actor_rollout_ref.actor.optim.clip_grad"] == "0.5"  # verl reads no actor.grad_clip
    assert (one["trainer.total_training_steps"], one["data.max_response_length"]) == ("40", "96")
    assert one["trainer.n_gpus_per_node"] == "2"


def test_verls_packed_rows_attend_as_separate_ones() -> None:
    import benchmarks.peers.verl_attention  # noqa: F401  # it registers the attention

    torch.manual_seed(0)
    apart = load_model(model_config("qwen3_moe")).eval()
    packed = load_model(model_config("qwen3_moe")).eval()
    packed.load_state_dict(apart.state_dict())
    packed.set_attn_implementation(of_verl.ATTENTION)
    rows = [torch.randint(5, 15, (1, count)) for count in (7, 3, 5)]
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    together = packed(input_ids=torch.cat(rows, 1), attention_mask=None, position_ids=positions).logits
    alone = torch.cat([apart(input_ids=row).logits for row in rows], 1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_verls_command_leaves_what_is_set(race: Race, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("PYTHONPATH", "/there")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    of_command = of_verl.environment_of(race, Path("/run"))
    assert (of_command["VERL_LOGGING_LEVEL"], of_command["NCCL_NVLS_ENABLE"]) == ("INFO", "0")
    assert of_command["RAY_memory_monitor_refresh_ms"] == "0"
    assert of_command["PYTHONPATH"] == f"{ROOT}:/there"
    assert msgspec.json.decode(of_command[of_verl.RACE], type=Race) == race


def test_verl_reads_the_conversations_that_headways_model_reads(race: Race) -> None:
    tokenizer = load_tokenizer(model_config("qwen3_moe"))
    tokenizer.chat_template = "{% for message in messages %}#{{ message.content }}{% endfor %}#"
    tokenizer.save_pretrained(race.model)
    spoken = msgspec.structs.replace(race, overrides=(*race.overrides, "prompts.system_prompt=1+1"))
    of_verl.write_prompts(spoken, race.model / "prompts.parquet")
    rows = parquet.read_table(race.model / "prompts.parquet").to_pylist()
    source = open_source(race.load().prompts, race.load().run.seed)
    assert len(rows) == 3 * 4
    assert rows[5]["prompt"] == [
        {"role": "system", "content": "1+1"},
        {"role": "user", "content": source.train(0, 5).content},
    ]
    assert rows[5]["reward_model"]["ground_truth"] == source.train(0, 5).ground_truth


def test_verls_metrics_become_figures_as_they_are_written(tmp_path: Path) -> None:
    file, began = tmp_path / "metrics.jsonl", time.time()
    metrics = {"timing_s/gen": 1.0, "timing_s/step": 4.0, "response_length/mean": 5.0, "critic/score/mean": 0.5}
    with of_verl.following(file) as lines, file.open("a") as written:
        for step in range(2):
            written.write(json.dumps({"step": step, "data": metrics}) + "\n")
            written.flush()
            wait_until(lambda: len(lines) == step + 1)  # noqa: B023  # called before the next step
    timed = [
        (began + 10.0, metrics),
        (began + 16.0, {**metrics, "timing_s/step": 6.0, "timing_s/save_checkpoint": 2.0}),
    ]
    one = of_verl.figures_from(timed, began, samples=8)
    assert (one.ends_s, one.samples_per_s, one.response_tokens) == ([10.0, 14.0], 2.0, 5.0)
    assert one.learner_idle == 0.25


def test_verls_logprobs_are_of_whole_rows_without_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    verls = SimpleNamespace(FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE=False)
    for name, module in {"verl": verls, "verl.utils": SimpleNamespace(torch_functional=verls)}.items():
        monkeypatch.setitem(sys.modules, name, module)
    stand_ins = runpy.run_module("benchmarks.peers.verl_stand_ins")  # imported, it would stay with this verl
    stand_ins["ROWS"] = 3
    assert verls.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).requires_grad_()
    labels, of_losses = torch.arange(8) % 5, torch.linspace(-1, 1, 8)
    losses, _ = verls.cross_entropy_loss(logits, labels, inplace_backward=True)
    (grads,) = torch.autograd.grad(losses @ of_losses, logits)
    exact = logits.detach().double().requires_grad_()
    expected = exact.logsumexp(-1) - exact[torch.arange(8), labels]
    (expected_grads,) = torch.autograd.grad(expected @ of_losses.double(), exact)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(grads.double(), expected_grads, atol=4e-3, rtol=0)  # in bfloat16
