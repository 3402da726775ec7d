import numpy as np
import pytest
import torch

from headway.weightsync.tensors.fingerprint import MODULUS, fingerprint, fingerprint_part

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.bool]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def written_out(tensor: torch.Tensor) -> int:
    """Compute the fingerprint by its definition, element by element."""
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    bits = np.frombuffer(raw, UNSIGNED[tensor.element_size()]).tolist()
    return sum(number * (2 * place + 1) for place, number in enumerate(bits)) % MODULUS


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (2, 3, 4), (0, 4)])
def test_it_is_what_it_is_defined_to_be(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random(shape, dtype)
    expected = written_out(tensor.reshape(-1)) if tensor.numel() else 0
    assert fingerprint(tensor) == expected


def test_every_bit_counts_and_so_does_its_place() -> None:
    tensor = random((6, 8), torch.bfloat16)
    seen = {fingerprint(tensor), fingerprint(tensor.T.contiguous().view(6, 8)), fingerprint(tensor.flip(0))}
    for place in range(48):
        for bit in range(16):
            changed = tensor.clone()
            changed.view(torch.int16).view(-1)[place] ^= -(1 << 15) if bit == 15 else 1 << bit
            seen.add(fingerprint(changed))
    assert len(seen) == 3 + 48 * 16


def test_parts_add_up_to_the_whole() -> None:
    tensor = random((6, 8), torch.float32)
    halves = [tensor[:, :4], tensor[:, 4:]]
    by_columns = [fingerprint_part(half.contiguous(), 4 * place, 8, 1) for place, half in enumerate(halves)]
    by_rows = [fingerprint_part(tensor[row : row + 2], 8 * row, 8, 1) for row in (0, 2, 4)]
    transposed = fingerprint_part(tensor.T.contiguous(), 0, 1, 8)
    assert sum(by_columns) % MODULUS == sum(by_rows) % MODULUS == transposed == fingerprint(tensor)


def test_signs_of_zero_and_payloads_of_nan_are_bits_too() -> None:
    zeros = torch.tensor([0.0, -0.0])
    assert fingerprint(zeros[:1]) != fingerprint(zeros[1:])
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fingerprint(nans[:1]) != fingerprint(nans[1:])
