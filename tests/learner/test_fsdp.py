# mypy: disable-error-code="union-attr"
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import headway.learner.backends.fsdp.sharding
import tests.learner.fsdp_rank as fsdp_rank
import tests.learner.whole_rank as whole_rank
from headway.broker.errors import ConfigError
from headway.learner.backends import open_backend
from headway.learner.backends.base import Backend
from headway.learner.backends.fsdp.backend import FsdpBackend
from headway.learner.backends.fsdp.policy import FEW_EXPERTS, Policy
from headway.learner.batching.batch import PackedBatch
from headway.learner.batching.packing import PackableSequence, concatenate, pack
from headway.learner.config import ComputeConfig, LayoutConfig, ModelConfig, OptimizerConfig
from headway.learner.models.pretrained import load_model, load_tokenizer
from tests.learner.fsdp_rank import Case, Result
from tests.learner.tiny import OPTIMIZER, VOCABULARY, model_config, ratio_loss, sequences, share
from tests.learner.torchrun import run_ranks

ARCHITECTURES = ["qwen3", "qwen3_moe"]
LENGTHS = [7, 12, 5, 20, 3, 9]


def ordinary_logprobs(model: PreTrainedModel, batch: PackedBatch, temperature: float) -> torch.Tensor:
    """Return the logprobs of an ordinary transformers forward of one sequence; 0 for its first token."""
    logits = model(input_ids=batch.token_ids_T[None]).logits[0, :-1]
    log_softmax = (logits.float() / temperature).log_softmax(-1)
    return torch.nn.functional.pad(log_softmax.gather(1, batch.token_ids_T[1:, None])[:, 0], (1, 0))


@torch.no_grad()
def ordinary_hidden(model: PreTrainedModel, *lengths: int) -> torch.Tensor:
    ones = [concatenate([sequence]) for sequence in sequences(list(lengths))]
    return torch.cat([model.base_model(input_ids=one.token_ids_T[None]).last_hidden_state[0] for one in ones])


def ordinary_loss(model: PreTrainedModel, given: list[PackableSequence], temperature: float) -> torch.Tensor:
    """Return the loss of one sequence at a time, never packed."""
    ones = [concatenate([sequence]) for sequence in given]
    shares = [share(one, ordinary_logprobs(model, one, temperature), trained_tokens(given)) for one in ones]
    return torch.stack(shares).sum()


def trained_tokens(given: list[PackableSequence]) -> float:
    return float(sum(sequence.loss_mask.sum() for sequence in given))


def as_dict(backend: Backend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.named_tensors()}


@pytest.mark.parametrize(
    "config",
    [
        model_config("qwen3"),
        model_config("qwen3_moe", num_experts=FEW_EXPERTS),
        model_config("qwen3_moe", num_experts=9),
    ],
    ids=["dense", "few experts", "many experts"],
)
def test_packed_loss_and_gradients_equal_unpacked_ones(config: ModelConfig) -> None:
    given = sequences(LENGTHS)
    model = load_model(config, 1)
    loss = ordinary_loss(model, given, 0.8)
    loss.backward()
    policy = Policy(load_model(config, 1), on_cpu=True, half_precision=False)
    batch = concatenate(given)
    packed = share(batch, policy(batch, 0.8), trained_tokens(given))
    packed.backward()
    assert packed.item() == pytest.approx(loss.item(), abs=1e-5)
    expected = dict(model.named_parameters())
    for name, parameter in policy.model.named_parameters():
        assert expected[name].grad.abs().max() > 0
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_streamed", [True, False], ids=["from files", "random"])
@pytest.mark.parametrize("pad", ["eos", "ordinary", "last", "tokenizer"])
def test_no_tokens_embedding_loses_its_gradient(pad: str, is_streamed: bool, tmp_path: Path) -> None:
    """Whatever the model's files call padding: a loop over float64 tokens knows none."""
    config = model_config("qwen3", tied=False)
    given, pads = sequences(LENGTHS), {"eos": VOCABULARY - 1, "ordinary": 3, "last": -1, "tokenizer": None}
    if is_streamed:
        model, tokenizer = load_model(config, 1), load_tokenizer(config)
        model.config.pad_token_id = pads[pad]
        tokenizer.pad_token = "<eos>" if pad == "eos" else None
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        config = ModelConfig(path=str(tmp_path))
    backend = open_backend("fsdp", config, OPTIMIZER, seed=1)
    assert isinstance(backend, FsdpBackend)
    reference = load_model(config, 1).double()
    reference.get_input_embeddings().padding_idx = None
    ordinary_loss(reference, given, 1.0).backward()
    batch, policy = concatenate(given), backend._module
    share(batch, policy(batch, 1.0), trained_tokens(given)).backward()
    expected = reference.get_input_embeddings().weight.grad
    assert expected[given[3].token_ids].abs().amax(1).min() > 0
    got = policy.model.get_input_embeddings().weight.grad.double()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_an_ordinary_forward(architecture: str, temperature: float) -> None:
    backend = open_backend("fsdp", model_config(architecture), OPTIMIZER, seed=2)
    model = load_model(model_config(architecture), 2)
    for batch in pack(sequences(LENGTHS), 0, 1, 25):
        (got,) = backend.logprobs([batch], temperature)
        assert not got.requires_grad
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            one = concatenate(sequences([end - start]))
            one.token_ids_T.copy_(batch.token_ids_T[start:end])
            torch.testing.assert_close(got[start:end], ordinary_logprobs(model, one, temperature), rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hidden_states_are_an_ordinary_forwards(architecture: str) -> None:
    backend = open_backend("fsdp", model_config(architecture), OPTIMIZER, seed=2)
    assert isinstance(backend, FsdpBackend)
    got = backend.hidden(concatenate(sequences(LENGTHS)))
    expected = ordinary_hidden(load_model(model_config(architecture), 2), *LENGTHS)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_weights_make_bit_equal_steps_and_are_never_stale(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model gathers its weights for every layer; `logprobs` after any change of shards sees the change."""
    always_shard(monkeypatch)
    config = model_config("qwen3", dtype=dtype)
    kept, follower = (open_backend("fsdp", config, OPTIMIZER, seed=3) for _ in range(2))
    monkeypatch.setattr(headway.learner.backends.fsdp.sharding, "GATHERED_WEIGHT_BYTES", 0)
    regathered = open_backend("fsdp", config, OPTIMIZER, seed=3)
    batches = pack(sequences(LENGTHS), 0, 1, 20)
    assert len(batches) > 2
    for _ in range(2):
        assert_equal_logprobs(kept, regathered, batches)
        follower.logprobs(batches, 1.0)
        results = [backend.step(batches, ratio_loss(batches, 10.0), 0.9, 1e-3) for backend in (kept, regathered)]
        assert results[0] == results[1]
        follower.follow(kept, 0.0)
        assert_equal_logprobs(kept, follower, batches)
    assert_equal_logprobs(kept, regathered, batches)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_single_cpu_without_shards_makes_bit_equal_steps_and_checkpoints(
    architecture: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, backends = model_config(architecture, tied=tied), dict[str, Backend]()
    for name in ("plain", "sharded"):
        backends[name] = open_backend("fsdp", config, OPTIMIZER, seed=3)
        always_shard(monkeypatch)
    plain, sharded = backends.values()
    assert isinstance(plain, FsdpBackend)
    assert isinstance(sharded, FsdpBackend)
    assert not any(isinstance(one, DTensor) for one in plain._module.parameters())
    assert all(isinstance(one, DTensor) for one in sharded._module.parameters())
    batches = pack(sequences(LENGTHS), 0, 1, 20)
    for _ in range(2):
        results = [backend.step(batches, ratio_loss(batches, 10.0), 0.9, 1e-3) for backend in (plain, sharded)]
        assert results[0] == results[1]
    for name, backend in backends.items():
        backend.save(tmp_path / name)
    plain.load(tmp_path / "sharded")
    sharded.load(tmp_path / "plain")
    results = [backend.step(batches, ratio_loss(batches, 10.0), 0.9, 1e-3) for backend in (plain, sharded)]
    assert results[0] == results[1]
    assert_equal_logprobs(plain, sharded, batches)


def always_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard models opened from now on by a single CPU, too."""
    monkeypatch.setattr(headway.learner.backends.fsdp.sharding, "needs_shards", lambda *_, **__: True)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_forward_pass_does_not_look_for_packed_sequences(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers does, to make a mask, and reads the answer: the process would wait for a GPU."""

    def looked(position_ids: torch.Tensor) -> None:
        raise AssertionError(f"{position_ids} were looked at")

    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", looked)
    policy = Policy(load_model(model_config(architecture)), on_cpu=True, half_precision=False)
    assert policy(concatenate(sequences([3, 5])), 1.0).shape == (8,)


def assert_equal_logprobs(backend: Backend, other: Backend, batches: list[PackedBatch]) -> None:
    got, expected = (torch.cat(each.logprobs(batches, 1.0)) for each in (backend, other))
    assert torch.equal(got, expected)


def reference_steps(architecture: str, *steps: list[PackableSequence]) -> tuple[PreTrainedModel, list[list[float]]]:
    """Take the same steps with an ordinary model, AdamW and clipping."""
    model = load_model(model_config(architecture), 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=OPTIMIZER.weight_decay)
    results = []
    for given in steps:
        optimizer.zero_grad()
        loss = ordinary_loss(model, given, 0.9)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)
        optimizer.step()
        results.append([loss.item(), norm.item()])
    return model, results


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("budget", [1, 30, 1000])
def test_any_split_into_micro_batches_makes_the_same_step(architecture: str, budget: int) -> None:
    backend = open_backend("fsdp", model_config(architecture), OPTIMIZER, seed=3)
    model, expected = reference_steps(architecture, *(sequences(LENGTHS, seed=seed) for seed in (0, 1)))
    for seed, (loss, norm) in enumerate(expected):
        given = sequences(LENGTHS, seed=seed)
        batches = pack(given, 0, 1, budget)
        got_loss, got_norm, reports = backend.step(batches, ratio_loss(batches, trained_tokens(given)), 0.9, 1e-3)
        assert got_loss == pytest.approx(loss, abs=1e-5)
        assert got_norm == pytest.approx(norm, rel=1e-5)
        assert sum(report["tokens"] for report in reports) == trained_tokens(given)
    assert norm > OPTIMIZER.max_grad_norm, "clipping must have been put to the test"
    assert_parameters_close(as_dict(backend), dict(model.named_parameters()))


PARAMETERS_ATOL = 3e-5
"""Adam divides a gradient by its own size, so the rounding of a small one moves its element by a share of the step."""


def assert_parameters_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare parameters by Hugging Face name; the experts of the reference are fused."""
    for name, parameter in expected.items():
        if "experts" not in name:
            torch.testing.assert_close(got[name], parameter.detach(), rtol=0, atol=PARAMETERS_ATOL)
            continue
        layer = name.split(".experts.")[0]
        for expert, weight in enumerate(parameter.detach()):
            kinds = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            files = torch.cat([got[f"{layer}.experts.{expert}.{kind}.weight"] for kind in kinds])
            torch.testing.assert_close(files, weight, rtol=0, atol=PARAMETERS_ATOL)


def ranks_of(directory: Path, cases: list[Case], count: int) -> list[list[list[Result]]]:
    """Return results as [case][rank][step]."""
    given = [msgspec.json.encode(case).decode() for case in cases]
    run_ranks(fsdp_rank.__name__, count, directory, *given)
    return [
        [results_of(directory / str(number) / f"rank_{r}.json") for r in range(count)] for number in range(len(cases))
    ]


def results_of(file: Path) -> list[Result]:
    return msgspec.json.decode(file.read_bytes(), type=list[Result])


RANKS = {
    2: [
        Case(architecture="qwen3"),
        Case(architecture="qwen3_moe", is_large=True),
        Case(architecture="qwen3", layout=LayoutConfig(context=2), compute=ComputeConfig(recompute="selective")),
        Case(architecture="qwen3_moe", layout=LayoutConfig(context=2), compute=ComputeConfig(offload_optimizer=True)),
    ],
    3: [Case(architecture="qwen3_moe")],  # 3 divides none of its sizes
    4: [
        Case(architecture="qwen3", layout=LayoutConfig(context=4)),
        Case(architecture="qwen3_moe", layout=LayoutConfig(context=2), compute=ComputeConfig(recompute="full")),
    ],
}
"""The cases by number of ranks. The models have 4 heads and 2 key/value heads, so 4 ranks hold copies of these."""


@pytest.mark.slow
@pytest.mark.parametrize("count", RANKS)
def test_any_ranks_equal_one(count: int, tmp_path: Path) -> None:
    for number, (case, ranks) in enumerate(zip(RANKS[count], ranks_of(tmp_path, RANKS[count], count), strict=True)):
        model, expected = reference_steps(case.architecture, *map(fsdp_rank.step_sequences, (0, 1)))
        has_empty = any(result.empty for results in ranks for result in results)
        assert has_empty is (case.layout.context < count), "a rank without a sequence must have been tried"
        for results in ranks:
            assert [result.loss for result in results] == pytest.approx([loss for loss, _ in expected], abs=1e-5)
            assert [result.norm for result in results] == pytest.approx([norm for _, norm in expected], rel=1e-5)
        for rank in range(count):
            hidden = load_file(tmp_path / str(number) / f"hidden_{rank}.safetensors")["hidden"]
            torch.testing.assert_close(hidden, ordinary_hidden(model, *fsdp_rank.LENGTHS[1]), rtol=0, atol=1e-4)
        tensors = load_file(tmp_path / str(number) / "tensors.safetensors")
        assert_parameters_close(tensors, dict(model.named_parameters()))
        alone = open_backend("fsdp", model_config(case.architecture), OPTIMIZER)
        alone.load(tmp_path / str(number) / "checkpoint")
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in alone.named_tensors())


@pytest.mark.slow
def test_shards_of_all_kinds_are_gathered_as_they_were_cut() -> None:
    run_ranks(whole_rank.__name__, 3)


def test_a_name_that_changes_behind_the_layers_does_so_where_those_before_them_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def renamed(_: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.replace("lm_head", "output"): tensor for name, tensor in tensors.items()}

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", renamed)
    backend = open_backend("fsdp", model_config("qwen3", tied=False), OPTIMIZER)
    for _ in range(2):
        names = as_dict(backend).keys()
        assert "output.weight" in names
        assert "lm_head.weight" not in names


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_named_tensors_are_what_save_pretrained_writes(architecture: str, tied: bool, tmp_path: Path) -> None:
    model = load_model(model_config(architecture, tied=tied), 6)
    model.save_pretrained(tmp_path)
    backend = open_backend("fsdp", model_config(architecture, tied=tied), OPTIMIZER, seed=6)
    got, expected = as_dict(backend), load_file(tmp_path / "model.safetensors")
    assert got.keys() == expected.keys()
    assert ("lm_head.weight" in got) is not tied
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())


def test_bfloat16_rounds_what_leaves_and_keeps_fp32_weights(tmp_path: Path) -> None:
    backend = open_backend("fsdp", model_config("qwen3_moe", dtype="bfloat16"), OPTIMIZER, seed=3)
    exact = open_backend("fsdp", model_config("qwen3_moe"), OPTIMIZER, seed=3)
    batches = pack(sequences(LENGTHS), 0, 1, 30)
    loss = ratio_loss(batches, 10.0)
    half, full = (each.step(batches, loss, 1.0, 1e-6) for each in (backend, exact))
    assert half[0] == pytest.approx(full[0], rel=0.05)
    assert half[1] == pytest.approx(full[1], rel=0.1)
    assert {tensor.dtype for tensor in as_dict(backend).values()} == {torch.bfloat16}
    backend.save(tmp_path / "half")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert exported.dtype == torch.bfloat16
    backend.step(batches, loss, 1.0, 1e-6)
    after = as_dict(backend)
    backend.load(tmp_path / "half")
    backend.step(batches, loss, 1.0, 1e-6)
    assert all(torch.equal(tensor, after[name]) for name, tensor in backend.named_tensors())


def test_a_broken_gradient_leaves_the_weights() -> None:
    backend = open_backend("fsdp", model_config("qwen3"), OPTIMIZER)
    before = as_dict(backend)
    batches = pack(sequences(LENGTHS), 0, 1, 1000)
    _, norm, _ = backend.step(batches, lambda _, logprobs: ((logprobs * torch.inf).sum(), {}), 1.0, 1e-3)
    assert norm != norm or norm == float("inf")
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.named_tensors())


def test_a_batch_without_anything_to_train_is_a_step() -> None:
    backend = open_backend("fsdp", model_config("qwen3_moe"), OptimizerConfig())
    before = as_dict(backend)
    for batches in (pack([], 0, 1, 100), pack(sequences(LENGTHS), 0, 1, 100)):
        loss, norm, reports = backend.step(batches, lambda _, logprobs: (torch.tensor(0.0), {"seen": 1.0}), 1.0, 1e-3)
        assert (loss, norm) == (0.0, 0.0)
        assert reports == [{"seen": 1.0} if batch.num_sequences else {} for batch in batches]
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.named_tensors())


class OwnBackend:
    """A user's own backend, found by its import path."""

    def __init__(
        self, model: ModelConfig, optimizer: OptimizerConfig, *, device: str, seed: int, **layout: object
    ) -> None:
        self.arguments = (model, optimizer, device, seed)

    def __getattr__(self, name: str) -> object:
        """Return an ability of any name."""
        return None


def test_backends_by_name() -> None:
    own = open_backend(f"{__name__}:OwnBackend", model_config("qwen3"), OPTIMIZER, seed=9)
    assert isinstance(own, OwnBackend)
    assert own.arguments == (model_config("qwen3"), OPTIMIZER, "cpu", 9)
    for kind, message in (
        ("fdsp", "there is no 'fdsp'"),
        ("nowhere:Own", "cannot import"),
        (f"{__name__}:No", "has no 'No'"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_backend(kind, model_config("qwen3"), OPTIMIZER)


def test_models_with_other_logits_are_refused() -> None:
    config = model_config("cohere", num_experts=0)
    del config.random.config["head_dim"], config.random.config["num_experts"]
    with pytest.raises(ConfigError, match="logit_scale"):
        open_backend("fsdp", config, OPTIMIZER)


def test_a_head_with_a_bias_is_refused() -> None:
    model = load_model(model_config("qwen3"), 1)
    model.lm_head = torch.nn.Linear(*reversed(model.lm_head.weight.shape))
    with pytest.raises(ConfigError, match="head with a bias"):
        Policy(model, on_cpu=True, half_precision=False)
