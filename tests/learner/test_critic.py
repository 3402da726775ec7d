# mypy: disable-error-code="attr-defined, union-attr"
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from headway.broker.errors import ConfigError
from headway.learner.backends import open_backend
from headway.learner.backends.fsdp.backend import FsdpValueBackend
from headway.learner.backends.fsdp.policy import FEW_EXPERTS, ValueModel
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import PackableSequence, concatenate, pack
from headway.learner.checkpoint import CheckpointError
from headway.learner.config import ModelConfig
from headway.learner.models.pretrained import load_model
from headway.learner.objective.critic import Critic, outcome_rewards
from headway.learner.ranks import Ranks
from tests.learner import critic_rank
from tests.learner.critic_rank import CLIP, GAMMA, LAM, LEARNING_RATE, LENGTHS, Result, critic_of, open_values
from tests.learner.tiny import OPTIMIZER, model_config, sequences
from tests.learner.torchrun import run_ranks

ARCHITECTURES = ["qwen3", "qwen3_moe"]


class OrdinaryCritic:
    """An ordinary transformers model, a linear head and AdamW, one sequence at a time; loops in float64."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.model: PreTrainedModel = load_model(config, seed)
        self.head = nn.Linear(self.model.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        optimizer = critic_rank.OPTIMIZER
        self.parameters = [*self.model.base_model.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=LEARNING_RATE,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
        )

    def values(self, sequence: PackableSequence) -> torch.Tensor:
        token_ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        hidden = self.model.base_model(input_ids=token_ids[None]).last_hidden_state[0]
        return torch.cat([torch.zeros(1), self.head(hidden)[:-1, 0]])

    def step(self, given: list[PackableSequence]) -> Result:
        old = [self.values(one).tolist() for one in given]
        estimates = [loop_gae(one, values) for one, values in zip(given, old, strict=True)]
        trained = [a for advantages, _ in estimates for a in advantages.values()]
        trained_returns = [r for _, returns in estimates for r in returns.values()]
        metrics = {
            "return_mean": float(np.mean(trained_returns)),
            "value_mean": float(np.mean(trained_returns) - np.mean(trained)),
            "explained_variance": float(1 - np.var(trained) / np.var(trained_returns)),
        }
        for number in range(2):
            for name, value in self.update(given, [returns for _, returns in estimates], old).items():
                metrics[f"{name} {number}"] = value
        mean, deviation = np.mean(trained), np.sqrt(np.var(trained, ddof=1) + 1e-8)
        whitened = {
            number: [(advantages[t] - mean) / deviation if t in advantages else 0.0 for t in range(len(one.token_ids))]
            for number, (one, (advantages, _)) in enumerate(zip(given, estimates, strict=True))
        }
        return Result(metrics, whitened, dict(enumerate(old)))

    def update(
        self, given: list[PackableSequence], returns: list[dict[int, float]], old: list[list[float]]
    ) -> dict[str, float]:
        self.optimizer.zero_grad()
        losses, clipped = [], 0
        for one, goals, before in zip(given, returns, old, strict=True):
            values = self.values(one)
            for t, goal in goals.items():
                near = before[t] + (values[t] - before[t]).clamp(-CLIP, CLIP)
                free, held = (values[t] - goal) ** 2, (near - goal) ** 2
                clipped += bool(abs(values[t] - before[t]) > CLIP and held > free)
                losses.append(torch.maximum(free, held) / 2)
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, critic_rank.OPTIMIZER.max_grad_norm)
        self.optimizer.step()
        return {
            "value_loss": loss.item(),
            "value_grad_norm": norm.item(),
            "value_clip_fraction": clipped / len(losses),
        }


def loop_gae(one: PackableSequence, values: list[float]) -> tuple[dict[int, float], dict[int, float]]:
    """Return advantages and returns by trained token."""
    places = [one.prompt_length + int(t) for t in np.flatnonzero(one.loss_mask)]
    advantages: dict[int, float] = {}
    later, next_value = 0.0, 0.0
    for t in reversed(places):
        reward = float(one.advantages[0]) if t == places[-1] else 0.0
        later = reward + GAMMA * next_value - values[t] + GAMMA * LAM * later
        advantages[t], next_value = later, values[t]
    return advantages, {t: advantage + values[t] for t, advantage in advantages.items()}


def assert_same(got: list[Result], expected: list[Result]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.metrics == pytest.approx(theirs.metrics, rel=2e-4, abs=2e-5)
        assert mine.advantages.keys() == mine.old_values.keys() == theirs.advantages.keys()
        for number, advantages in theirs.advantages.items():
            assert mine.old_values[number] == pytest.approx(theirs.old_values[number], abs=2e-5)
            assert mine.advantages[number] == pytest.approx(advantages, abs=2e-4)


def value_model(config: ModelConfig) -> ValueModel:
    model = ValueModel(load_model(config, 1), on_cpu=True, half_precision=False)
    torch.manual_seed(0)
    nn.init.normal_(model.head.weight)
    nn.init.normal_(model.head.bias)
    return model


@pytest.mark.parametrize(
    "config",
    [
        model_config("qwen3"),
        model_config("qwen3", tied=False),
        model_config("qwen3_moe", num_experts=FEW_EXPERTS),
        model_config("qwen3_moe", num_experts=9),
    ],
    ids=["dense", "untied", "few experts", "many experts"],
)
def test_packed_values_and_gradients_equal_those_of_an_ordinary_forward(config: ModelConfig) -> None:
    given = sequences([7, 12, 1, 20, 3, 2])
    packed, ordinary = value_model(config), OrdinaryCritic(config, 1)
    ordinary.head.load_state_dict(packed.head.state_dict())
    expected = torch.cat([ordinary.values(one) for one in given])
    got = packed(concatenate(given))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    alone = torch.cat([packed(concatenate([one])) for one in given])
    torch.testing.assert_close(got, alone, rtol=0, atol=1e-5)
    weights = torch.linspace(-1, 1, got.numel())
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    assert packed.head.weight.grad.abs().max() > 0.1
    torch.testing.assert_close(packed.head.weight.grad, ordinary.head.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed.head.bias.grad, ordinary.head.bias.grad, rtol=1e-4, atol=1e-4)
    parameters = dict(ordinary.model.base_model.named_parameters())
    for name, parameter in packed.model.named_parameters():
        assert parameters[name].grad.abs().max() > 0
        torch.testing.assert_close(parameter.grad, parameters[name].grad, rtol=1e-4, atol=1e-4)


def test_the_value_of_a_state_does_not_know_the_token_chosen_in_it() -> None:
    model, (one,) = value_model(model_config("qwen3")), sequences([12])
    before, chosen = model(concatenate([one])), 8
    one.token_ids[chosen:] = (one.token_ids[chosen:] + 1) % 17
    after = model(concatenate([one]))
    torch.testing.assert_close(before[: chosen + 1], after[: chosen + 1], rtol=0, atol=1e-6)
    assert before[0] == 0
    assert (before[chosen + 1 :] != after[chosen + 1 :]).all()


def test_values_are_zero_before_the_first_step() -> None:
    backend = open_values("qwen3_moe")
    batches = pack(sequences([9, 14, 6]), 0, 1, 16)
    assert all(values_T.dtype == torch.float32 and not values_T.any() for values_T in backend.values(batches))
    lengths = [len(values_T) for values_T in backend.values([*batches, concatenate([])])]
    assert lengths == [*(batch.num_tokens for batch in batches), 0]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("budget", [1, 30, 1000])
def test_any_split_into_micro_batches_makes_the_same_steps(architecture: str, budget: int) -> None:
    ordinary = OrdinaryCritic(model_config(architecture), 3)
    expected = [ordinary.step(sequences(lengths, seed=seed)) for seed, lengths in enumerate(LENGTHS)]
    assert max(result.metrics["value_clip_fraction 1"] for result in expected) > 0, "no value was clipped"
    norms = [value for result in expected for name, value in result.metrics.items() if "norm" in name]
    assert min(norms) < critic_rank.OPTIMIZER.max_grad_norm < max(norms), "no gradient was clipped, or all"
    assert_same(critic_rank.steps(open_values(architecture), budget), expected)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_equal_one_and_one_goes_on_from_their_checkpoint(architecture: str, tmp_path: Path) -> None:
    run_ranks(critic_rank.__name__, 2, tmp_path, architecture)
    alone = open_values(architecture)
    expected = critic_rank.steps(alone)
    ranks = [msgspec.json.decode((tmp_path / f"rank_{rank}.json").read_bytes(), type=list[Result]) for rank in (0, 1)]
    assert any(not result.advantages for result in ranks[1]), "no rank without a sequence was tried"
    for first, second, whole in zip(*ranks, expected, strict=True):
        assert first.metrics == second.metrics
        both = Result(first.metrics, first.advantages | second.advantages, first.old_values | second.old_values)
        assert_same([both], [whole])
    resumed = open_values(architecture, seed=9)
    resumed.load(tmp_path / "checkpoint")
    later = sequences([21, 8], seed=5)
    assert_same([critic_rank.step(resumed, later, 30)], [critic_rank.step(alone, later, 30)])


def test_a_regression_on_fixed_returns_goes_down() -> None:
    backend = open_values("qwen3")
    critic = Critic(backend, Ranks(0, 1, 0, 1, is_lead=True), clip=1e9, gamma=1.0, lam=1.0, learning_rate=1e-2)
    batches = pack(sequences([14, 9, 11]), 0, 1, 40)
    old_values = critic.values(batches)
    returns, _, before = critic.returns_and_advantages(batches, [outcome_rewards(b) for b in batches], old_values)
    losses = [critic.update(batches, returns, old_values)["value_loss"] for _ in range(30)]
    assert losses[-1] < losses[0] / 20
    rewards = [outcome_rewards(batch) for batch in batches]
    _, _, after = critic.returns_and_advantages(batches, rewards, critic.values(batches))
    assert before["explained_variance"] == pytest.approx(0, abs=1e-9)
    assert after["explained_variance"] > 0.9
    assert after["return_mean"] == pytest.approx(before["return_mean"], abs=1e-5)


def test_rewards_stand_at_the_last_trained_token() -> None:
    first, second, none = sequences([9, 6, 5])
    first.loss_mask[:] = [1, 1, 0, 1, 1, 0]
    second.loss_mask[:] = 1
    none.loss_mask[:] = 0
    rewards = outcome_rewards(concatenate([first, none, second])).tolist()
    places = {7: float(first.advantages[0]), 19: float(second.advantages[0])}
    assert rewards == [places.get(t, 0.0) for t in range(20)]
    assert outcome_rewards(concatenate([])).tolist() == []


def test_advantages_are_whitened_over_trained_tokens_only() -> None:
    critic = critic_of(open_values("qwen3"))
    batches = [*pack(sequences([14, 9, 11, 20]), 0, 1, 30), concatenate([])]
    values = [torch.randn(batch.num_tokens) for batch in batches]
    _, advantages, _ = critic.returns_and_advantages(batches, [outcome_rewards(b) for b in batches], values)
    trained = torch.cat([a[batch.loss_mask_T > 0] for a, batch in zip(advantages, batches, strict=True)])
    others = torch.cat([a[batch.loss_mask_T == 0] for a, batch in zip(advantages, batches, strict=True)])
    assert trained.mean().item() == pytest.approx(0, abs=1e-6)
    assert trained.var().item() == pytest.approx(1, abs=1e-5)
    assert not others.any()


def everything(backend: FsdpValueBackend) -> dict[str, torch.Tensor]:
    """Return parameters, moments and step counters."""
    state = {
        name: getattr(parameter, "full_tensor", parameter.clone)()
        for name, parameter in backend._module.named_parameters()
    }
    for name, parameter in backend._module.named_parameters():
        for key, value in backend._optimizer.state[parameter].items():
            state[f"{name}.{key}"] = getattr(value, "full_tensor", value.clone)()
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_critic_ends_bit_for_bit_where_an_uninterrupted_one_does(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    backend = open_values(architecture, dtype=dtype)
    assert isinstance(backend, FsdpValueBackend)
    critic_rank.step(backend, sequences([9, 14, 6]), 16)
    saved = {name: getattr(p, "full_tensor", p.clone)().clone() for name, p in backend._module.named_parameters()}
    backend.save(tmp_path / "step" / "critic")
    assert [path.name for path in (tmp_path / "step").iterdir()] == ["critic"]
    critic_rank.step(backend, sequences([12, 5], seed=1), 16)
    resumed = open_values(architecture, seed=99, dtype=dtype)
    assert isinstance(resumed, FsdpValueBackend)
    resumed.load(tmp_path / "step" / "critic")
    loaded = {name: getattr(p, "full_tensor", p.clone)() for name, p in resumed._module.named_parameters()}
    assert saved["head.weight"].any()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())
    critic_rank.step(resumed, sequences([12, 5], seed=1), 16)
    expected, got = everything(backend), everything(resumed)
    assert {"head.weight", "head.bias.exp_avg", "model.norm.weight.exp_avg_sq", "head.weight.step"} <= expected.keys()
    assert not any("lm_head" in name for name in expected)
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


def test_a_checkpoint_without_a_critic_is_refused(tmp_path: Path) -> None:
    policy, critic = open_backend("fsdp", model_config("qwen3"), OPTIMIZER), open_values("qwen3")
    policy.save(tmp_path / "policy")
    for directory in (tmp_path / "policy", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="does not hold a training state"):
            critic.load(directory)


@pytest.mark.slow
def test_bfloat16_leaves_the_head_in_fp32() -> None:
    exact, half = open_values("qwen3"), open_values("qwen3", dtype="bfloat16")
    seen: list[torch.dtype] = []
    half._module.head.register_forward_hook(lambda head, *_: seen.append(head.weight.dtype))
    given = sequences([9, 14, 6])
    results = [[critic_rank.step(backend, given, 16) for _ in range(4)] for backend in (exact, half)]
    for one, other in zip(*results, strict=True):
        for number, values in one.old_values.items():
            assert other.old_values[number] == pytest.approx(values, abs=0.05)
    assert max(abs(value) for values in results[0][-1].old_values.values() for value in values) > 0.05
    assert set(seen) == {torch.float32}


class OwnBackend:
    """A user's own backend, which can hold either model."""

    def __init__(self, model: ModelConfig, optimizer: object, *, head: str = "policy", **layout: object) -> None:
        self.head = head

    def __getattr__(self, name: str) -> object:
        """Return an ability of any name."""
        return None


class OwnPolicy:
    """A user's own backend, which has no critic."""

    def __init__(self, model: ModelConfig, optimizer: object, *, seed: int, device: str, **layout: object) -> None:
        self.seed = seed


def test_own_backends_are_asked_for_a_value_head() -> None:
    config = model_config("qwen3")
    own = open_backend(f"{__name__}:OwnBackend", config, OPTIMIZER, head="value")
    assert isinstance(own, OwnBackend)
    assert own.head == "value"
    with pytest.raises(ConfigError, match="let your own class take `head`"):
        open_backend(f"{__name__}:OwnPolicy", config, OPTIMIZER, head="value")


def test_a_batch_without_anything_to_train_is_a_step() -> None:
    backend = open_values("qwen3")
    critic = critic_of(backend)
    sequence: PackedBatch = concatenate(sequences([5]))
    sequence.loss_mask_T.zero_()
    for batches in ([concatenate([])], [sequence]):
        values = critic.values(batches)
        returns, advantages, metrics = critic.returns_and_advantages(batches, [v.clone() for v in values], values)
        assert not any(a.any() for a in advantages)
        metrics |= critic.update(batches, returns, values)
        assert set(metrics.values()) == {0.0}
