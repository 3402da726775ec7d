# mypy: disable-error-code="arg-type, call-arg"
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.learner.models import attention
from headway.learner.models.attention import PackedLayout, bucketed_attention, packed_attention, plan_buckets

H, K, D = 4, 2, 8


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def projections(total: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(total)
    return [torch.randn(total, heads, D, generator=generator, dtype=dtype).requires_grad_() for heads in (H, K, K)]


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scale: float) -> torch.Tensor:
    """Return softmax(q k' scale + causal mask) v, written out for every sequence and head."""
    outputs = []
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        future = torch.full((end - start, end - start), float("-inf"), dtype=q.dtype).triu(1)
        heads = [
            ((q[start:end, h] @ k[start:end, h * K // H].T) * scale + future).softmax(-1) @ v[start:end, h * K // H]
            for h in range(H)
        ]
        outputs.append(torch.stack(heads, dim=1))
    return torch.cat(outputs)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
@settings(max_examples=30, deadline=None)
def test_equals_attention_written_out(lengths: list[int]) -> None:
    cu = boundaries(lengths)
    projected = projections(sum(lengths))
    packed = bucketed_attention(*projected, plan_buckets(cu), 0.3)
    naive = one_by_one(*projected, cu, 0.3)
    torch.testing.assert_close(packed, naive, rtol=0, atol=1e-12)
    pull = torch.randn(packed.shape, dtype=packed.dtype, generator=torch.Generator().manual_seed(1))
    gradients = zip(
        torch.autograd.grad(packed, projected, pull), torch.autograd.grad(naive, projected, pull), strict=True
    )
    for got, expected in gradients:
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def test_nothing_leaks_between_sequences() -> None:
    lengths = [7, 12, 5, 11, 1]
    cu = boundaries(lengths)
    q, k, v = projections(sum(lengths), torch.float32)
    before = bucketed_attention(q, k, v, plan_buckets(cu), 0.3)
    inside = slice(7, 19)
    changed = [rows.detach().clone() for rows in (q, k, v)]
    for rows in changed:
        rows[inside] = 1e4
    after = bucketed_attention(*changed, plan_buckets(cu), 0.3)
    assert torch.equal(before[:7], after[:7])
    assert torch.equal(before[19:], after[19:])
    gradient_q, gradient_k, gradient_v = torch.autograd.grad(before[inside].sum(), (q, k, v))
    for gradient in (gradient_q, gradient_k, gradient_v):
        assert not gradient[:7].any()
        assert not gradient[19:].any()


def test_buckets_hold_every_token_once_with_little_padding() -> None:
    lengths = list(range(10, 60))
    buckets = plan_buckets(boundaries(lengths))
    assert sum(size for size, _ in buckets.shapes) == len(lengths)
    assert buckets.gather[buckets.places].tolist() == list(range(sum(lengths)))
    assert len(buckets.gather) <= 1.5 * sum(lengths)


@pytest.mark.parametrize(
    "refused",
    [{"dropout": 0.1}, {"sliding_window": 4}, {"softcap": 30.0}, {"attention_mask": torch.ones(1)}],
    ids=lambda refused: next(iter(refused)),
)
def test_refuses_what_it_would_ignore(refused: dict[str, Any]) -> None:
    q, k, v = (rows.transpose(0, 1)[None] for rows in projections(9))
    arguments: dict[str, Any] = {
        "attention_mask": None,
        "packed_layout": PackedLayout.of(boundaries([4, 5])),
    }
    with pytest.raises(NotImplementedError, match="plain causal attention"):
        packed_attention(torch.nn.Module(), q, k, v, **(arguments | refused))


WIDTHS = [(64, 64), (192, 128), (48, 32), (24, 40), (20, 20)]
"""The widths of heads of queries and keys, and of values. DeepSeek's models have the second."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "of_values"), WIDTHS)
def test_varlen_kernel_agrees_with_buckets(dtype: torch.dtype, width: int, of_values: int) -> None:
    cu = boundaries([7, 64, 1, 300]).cuda()
    shapes = ((H, width), (K, width), (K, of_values))
    q, k, v = (torch.randn(372, *shape, device="cuda", dtype=dtype)[None].transpose(1, 2) for shape in shapes)
    module = torch.nn.Module()
    kernel, _ = packed_attention(module, q, k, v, None, packed_layout=PackedLayout.of(cu, varlen=True))
    exact, _ = packed_attention(module, q.double(), k.double(), v.double(), None, packed_layout=PackedLayout.of(cu))
    torch.testing.assert_close(kernel.double(), exact, rtol=0, atol=2e-2)


@pytest.mark.parametrize(("width", "of_values"), WIDTHS)
def test_the_kernel_gets_heads_of_one_width(width: int, of_values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses values of another width than queries, and widths that are no multiple of 8."""

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, *_: Any, **options: Any) -> Any:
        assert q.shape[2] == k.shape[2] == v.shape[2]
        assert q.shape[2] % 8 == 0
        return one_by_one(q, k, v, cu, options["scale"])

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    cu, generator = boundaries([5, 9, 1]), torch.Generator().manual_seed(0)
    rows = [
        torch.randn(15, *shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((H, width), (K, width), (K, of_values))
    ]
    found = attention.varlen_attention(*rows, PackedLayout.of(cu, varlen=True), 0.3)
    exact = bucketed_attention(*rows, plan_buckets(cu), 0.3)
    pull = torch.randn(exact.shape, generator=generator, dtype=torch.float64)
    for got, expected in zip(
        [found, *torch.autograd.grad(found, rows, pull)], [exact, *torch.autograd.grad(exact, rows, pull)], strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("mean", "width", "is_taken"), [(255, 64, False), (256, 64, True), (256, 136, False)])
def test_long_sequences_take_flash_attention_where_it_is(
    mean: int, width: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is long by the mean of its sequences, also after it has moved to its device."""
    monkeypatch.setattr(attention, "is_available", lambda device: True)
    taken: list[str] = []

    def taking(name: str) -> Any:
        def kernel(query: torch.Tensor, *_: Any) -> torch.Tensor:
            taken.append(name)
            return query

        return kernel

    for name in ("_flash_attention", "_torch_kernel"):
        monkeypatch.setattr(attention, name, taking(name))
    rows = torch.zeros(2 * mean, 1, width)
    layout = PackedLayout.of(boundaries([mean - 100, mean + 100]), varlen=True).moved(lambda tensor: tensor.clone())
    attention.varlen_attention(rows, rows, rows, layout, 1.0)
    assert taken == ["_flash_attention" if is_taken else "_torch_kernel"]
