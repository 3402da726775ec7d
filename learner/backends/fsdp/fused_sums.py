"""Gradients of weights are added to their fp32 sums by the products of matrices that compute them.

    rows ─ @ weight.T ─► outputs
    rows' gradient ◄─ @ weight ─ outputs' gradient ─ .T @ rows, added within the product ─► the weight's fp32 sum

Otherwise a row's gradient of a weight is rounded to bfloat16 and written, and a kernel of its own reads it and adds it:
12 bytes a parameter and row. The product reads and writes its sum alone, 8 bytes, while it multiplies.
"""

import types
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from learner.backends.token_logprobs import add_product


class GradientSum:
    """The place where the backward pass finds the sum of one weight's gradients."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        """The sum during an update; None: the gradient goes to autograd, if one is wanted."""


def sum_linear_layers(layers: Iterable[nn.Module], model: nn.Module) -> dict[nn.Parameter, GradientSum]:
    """Let the linear layers within `layers` add to sums, and return the sum of each weight; a weight that the model has
    in several places keeps its gradients from autograd."""
    uses = Counter(parameter for part in model.modules() for parameter in part.parameters(recurse=False))
    found: dict[nn.Parameter, GradientSum] = {}
    for layer in layers:
        for part in layer.modules():
            linear: Any = part
            if type(part) is nn.Linear and part.weight.requires_grad and uses[linear.weight] == 1:
                linear.gradient_sum = found[linear.weight] = GradientSum()
                linear.forward = types.MethodType(_summed, part)
    return found


def _summed(linear: Any, rows: torch.Tensor) -> torch.Tensor:
    """[..., O] the outputs of `nn.Linear`."""
    total = linear.gradient_sum.total
    if total is None:
        return F.linear(rows, linear.weight, linear.bias)
    outputs: torch.Tensor = summed_linear(rows, linear.weight, linear.bias, total)
    return outputs


@torch.library.custom_op("headway::summed_linear", mutates_args=())
def summed_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, total: torch.Tensor
) -> torch.Tensor:
    """[..., O] a linear layer's outputs of rows [..., I]. Its backward pass adds the gradient of `weight` [O, I] to
    `total` [O, I], in place and in the dtype of `total`, and gives autograd none of it."""
    return F.linear(rows, weight, bias)


@torch.library.custom_op("headway::add_gradient", mutates_args={"total"})
def _add_gradient(total: torch.Tensor, gradient: torch.Tensor, rows: torch.Tensor) -> None:
    add_product(total, gradient.flatten(0, -2).T, rows.flatten(0, -2))


@summed_linear.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return rows.new_empty((*rows.shape[:-1], weight.shape[0]))


@_add_gradient.register_fake
def _(*_: Any) -> None:
    return None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, weight, bias, total = inputs
    ctx.has_bias = bias is not None
    # Saved as the others are, it could not change until the backward pass, as by a layer's second call.
    ctx.total = total
    ctx.save_for_backward(rows, weight)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, weight = ctx.saved_tensors
    _add_gradient(ctx.total, gradient, rows)
    of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
    return gradient @ weight, None, of_bias, None


summed_linear.register_autograd(_backward, setup_context=_keep)
