"""Answers for a CPU to the functions of `torch.cuda` that Megatron Core calls even on a machine without CUDA.

Nothing here runs where CUDA is available. Patches are process-wide and made once, before the first model is built.
Tests that build a model in their own process remove them.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

_removals: list[Callable[[], Any]] = []
"""What gives torch and Megatron their own functions back, the last change first; empty where nothing is patched."""


def install_cpu_shim() -> None:
    """Patch torch and Megatron once; does nothing where CUDA is available."""
    if torch.cuda.is_available() or is_installed():
        return
    _answer_for_streams()
    _answer_for_generators()
    _keep_splits_on_the_cpu()
    _exchange_uneven_parts()
    mode = _CudaMeansCpu()
    mode.__enter__()  # type: ignore[no-untyped-call]
    _removals.insert(0, partial(mode.__exit__, None, None, None))


def is_installed() -> bool:
    """Whether torch and Megatron are patched in this process."""
    return bool(_removals)


def remove_cpu_shim() -> None:
    """Give torch and Megatron their own functions back."""
    while _removals:
        _removals.pop(0)()


def _replace(module: Any, **functions: Any) -> None:
    for name, function in functions.items():
        _removals.insert(0, partial(setattr, module, name, getattr(module, name)))
        setattr(module, name, function)


class _CudaMeansCpu(TorchFunctionMode):
    """A mode in which tensors requested on "cuda", or in pinned memory, are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # buffers are looked up as "torch.cuda.*"
            return result.replace("torch.", "torch.cuda.")
        return result


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _Stream:
    """A stream without work: on a CPU a call returns when its work is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *args: Any, **kwargs: Any) -> "_Stream":
        return self

    def query(self) -> bool:
        return True


def _answer_for_streams() -> None:
    _replace(
        torch.cuda,
        Stream=_Stream,
        Event=_Stream,
        current_stream=_Stream,
        default_stream=_Stream,
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda *args, **kwargs: None,
        current_device=lambda: CPU,
    )


def _answer_for_generators() -> None:
    """Answer with the CPU's only generator, where Megatron keeps a state for each kind of parallelism."""
    import megatron.core.tensor_parallel.random as megatron_random

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    _replace(torch.cuda, manual_seed=torch.manual_seed, get_rng_state=get_state, set_rng_state=set_state)
    _replace(megatron_random, _get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)


def _keep_splits_on_the_cpu() -> None:
    """Turn sizes of an all-to-all into numpy: the token dispatcher does so only with sizes from a GPU."""
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _replace(token_dispatcher, maybe_move_tensor_to_cpu=to_cpu)


def _exchange_uneven_parts() -> None:
    """Gather and scatter by exchanges: expert-tensor ranks have uneven rows, and gloo can only exchange these."""
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_any(part: torch.Tensor, group: Any, output_split_sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, output_split_sizes, *args, **kwargs)
        copies = part.repeat(group.size(), *[1] * (part.dim() - 1))
        return _exchanged(copies, output_split_sizes, [len(part)] * group.size(), group)

    def reduce_any(parts: torch.Tensor, group: Any, input_split_sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(parts, group, input_split_sizes, *args, **kwargs)
        own = [input_split_sizes[group.rank()]] * group.size()
        received = _exchanged(parts, own, input_split_sizes, group)
        return received.view(group.size(), own[0], *parts.shape[1:]).sum(0)

    _replace(mappings, _gather_along_first_dim=gather_any, _reduce_scatter_along_first_dim=reduce_any)


def _exchanged(sent: torch.Tensor, received_sizes: Any, sent_sizes: Any, group: Any) -> torch.Tensor:
    received_sizes, sent_sizes = [int(size) for size in received_sizes], [int(size) for size in sent_sizes]
    received = sent.new_empty(sum(received_sizes), *sent.shape[1:])
    torch.distributed.all_to_all_single(received, sent.contiguous(), received_sizes, sent_sizes, group=group)
    return received
