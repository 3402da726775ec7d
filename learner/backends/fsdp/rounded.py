"""A single rank's weights in bfloat16, beside the fp32 masters that its optimizer updates.

    masters ─ rounded ─► copies, in the masters' places during passes ─► gradients in bfloat16 ─ added ─► fp32 sums

This is what FSDP2 computes on one rank, to the bit, without its hooks, and in memory whose addresses stay.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


class RoundedWeights:
    """The copies of a module's trained parameters and the sums of their gradients. Both are made when they are first
    needed. Frozen parameters stay in their places, rounded once: they are held as they are computed with."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, *, stays: bool = True) -> None:
        """`stays`: copies and sums keep their memory, for kernels that were recorded; else they are freed between calls
        and between updates."""
        self._dtype = dtype
        self._stays = stays
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self._places.setdefault(parameter, []).append((part, name))
                elif parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
        self._sums: list[torch.Tensor | None] = []
        """None: that parameter has got no gradient yet, and the sum has no memory."""
        self.copies: list[nn.Parameter] = []
        self._reached: set[int] = set()
        """The parameters that have got a gradient in this update. The optimizer leaves the others as they are."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the module computes with the masters as they are now, rounded."""
        if not self.copies:
            self.copies = [self._copy(index, master) for index, master in enumerate(self._places)]
        for copy in () if self._stays else self.copies:  # resizing moves memory, even to the size that it has
            copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        with torch.no_grad():
            torch._foreach_copy_([*self.copies], [*self._places])
        self._put(self.copies)
        try:
            yield
        finally:
            self._put(list(self._places))
            for copy in () if self._stays else self.copies:
                copy.untyped_storage().resize_(0)  # what the compiler has seen stays

    def begin(self) -> None:
        """Start the sums of an update's gradients at zero."""
        self._reached.clear()
        if not self._stays:
            self._sums = [None] * len(self._places)
            return
        if not self._sums:
            self._sums = [torch.zeros_like(master) for master in self._places]
        torch._foreach_zero_([total for total in self._sums if total is not None])

    def add(self, gradients: Sequence[torch.Tensor | None]) -> set[int]:
        """Add the gradients of all copies to the sums, and return which parameters have one; see `reach`."""
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                assert total is not None
                total.add_(gradient)
        return {index for index, gradient in enumerate(gradients) if gradient is not None}

    def reach(self, parameters: set[int]) -> None:
        """Say that these parameters have got a gradient."""
        self._reached |= parameters

    def give(self) -> None:
        """Make the sums the masters' gradients."""
        for index, (master, total) in enumerate(zip(self._places, self._sums, strict=True)):
            master.grad = total if index in self._reached else None
        if not self._stays:
            self._sums = []

    def release(self) -> None:
        """Free the memory of copies and sums, which have addresses of their own in each call from now on."""
        if self._stays:
            self.copies, self._stays = [], False
        self._sums = []

    def _copy(self, index: int, master: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(torch.empty_like(master, dtype=self._dtype))
        # Added up as soon as it is there, so that no pass holds the gradients of all parameters.
        hook = functools.partial(self._add_own, index)
        copy.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return copy

    def _add_own(self, index: int, copy: torch.Tensor) -> None:
        assert copy.grad is not None
        total = self._sums[index]
        if total is None:
            self._sums[index] = copy.grad.float()
        else:
            total.add_(copy.grad)
        self._reached.add(index)
        copy.grad = None

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter, places in zip(parameters, self._places.values(), strict=True):
            for part, name in places:
                part._parameters[name] = parameter
