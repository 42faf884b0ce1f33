"""Fused losses of libraries behind the interface of ours: each says what it cannot do.

All are called for the sum of the losses and differentiated at once, with 1 coming from above, so that what
follows (means, groups of ranks, main_grad, a graph that is kept) is the same code as for our own. Liger and
CCE are for CUDA, and were not run there: Liger was in Triton's interpreter, CCE's place was held by a
stand-in with its signature.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from burst_mcore import packages
from burst_mcore.dtypes import wide
from burst_mcore.loss.chunked import Head, Pass, Wanted, forward, valid_places
from burst_mcore.loss.terms import Terms

DEVICE = "cuda"
"""Of Liger's and CCE's kernels."""


class Problem(NamedTuple):
    """What a call asks for, as far as it decides who can serve it."""

    device: str
    dtype: torch.dtype
    grad_weight_dtype: torch.dtype
    terms: Terms
    reduction: str
    bias: bool
    weights: bool
    metrics: bool
    shared: bool
    """Whether ranks share the vocabulary."""


class Kernel(NamedTuple):
    """One way to make losses and their gradients."""

    supports: Callable[[Problem], str | None]
    """Why it cannot serve, None if it can."""
    forward: Callable[[Tensor, Tensor, Tensor | None, Head, Wanted], Pass]
    """As `chunked.forward`; of a library `losses` is [1], their sum."""


SumOfLosses = Callable[[Tensor, Tensor, Tensor | None, Tensor, Head], Tensor]
"""Of hidden [tokens, d], weight [V, d], bias [V] or None, labels [tokens]."""


def _kernel(loss: SumOfLosses, lacks: Callable[[Problem], str | None], can: Collection[str]) -> Kernel:
    def supports(problem: Problem) -> str | None:
        return _options(problem, can) or _rounding(problem) or lacks(problem)

    def run(hidden: Tensor, labels: Tensor, weights: Tensor | None, head: Head, wanted: Wanted) -> Pass:
        if head.valid_tokens == 0:  # there is nothing to call them for
            return forward(hidden, labels, weights, head, wanted)
        places = valid_places(labels != head.ignore_index, head.valid_tokens)
        learn = wanted.any_gradient
        h = (hidden if places is None else hidden[places]).detach().requires_grad_(wanted.hidden)
        w = head.weight.detach().requires_grad_(wanted.weight)
        b = None if head.bias is None else head.bias.detach().requires_grad_(wanted.bias)
        given = ((h, wanted.hidden), (w, wanted.weight), (b, wanted.bias))
        leaves = [x for x, want in given if want and x is not None]
        with torch.set_grad_enabled(learn):
            total = loss(h, w, b, labels if places is None else labels[places], head)
            found = iter(torch.autograd.grad(total, leaves) if learn else ())
        d_hidden, d_weight, d_bias = (next(found) if want and x is not None else None for x, want in given)
        if places is not None and d_hidden is not None:
            d_hidden = torch.zeros_like(hidden).index_copy_(0, places, d_hidden)
        return Pass(total.detach().to(wide(hidden.dtype))[None], d_hidden, d_weight, d_bias, None)

    return Kernel(supports, run)


def _options(problem: Problem, can: Collection[str]) -> str | None:
    terms = problem.terms
    asked = {
        "tp_group": problem.shared,
        "return_metrics": problem.metrics,
        "weights": problem.weights,
        "reduction='none' in one pass": problem.reduction == "none",
        "temperature": terms.temperature != 1.0,
        "softcap": terms.softcap is not None,
        "z_loss": terms.z_loss != 0.0,
        "label_smoothing": terms.label_smoothing != 0.0,
        "bias": problem.bias,
    }
    lacking = [name for name, wanted in asked.items() if wanted and name not in can]
    return f"it has no {', '.join(lacking)}" if lacking else None


def _rounding(problem: Problem) -> str | None:
    if wide(problem.dtype) == problem.dtype or problem.grad_weight_dtype == problem.dtype:
        return None
    return (
        f"it rounds the weight's gradient to {problem.dtype}: pass grad_weight_dtype={problem.dtype} "
        f"if that will do"
    )


def _on_cuda(problem: Problem, load: Callable[[], Any]) -> str | None:
    if problem.device != DEVICE:
        return f"it is for CUDA, not {problem.device}"
    if problem.dtype == torch.float64:
        return "it has no float64"
    found = load()
    return found if isinstance(found, str) else None


def _torch(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head) -> Tensor:
    chunk = min(head.chunk_tokens, len(hidden))
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk, allow_retain_graph=False)
    found: Tensor = functional.linear_cross_entropy(
        hidden, weight, labels, linear_bias=bias, reduction="sum",
        ignore_index=head.ignore_index, options=options,
    )  # fmt: skip
    return found


def _torch_lacks(problem: Problem) -> str | None:
    there = hasattr(functional, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")
    return None if there else f"torch has it from 2.13 on, this is {torch.__version__}"


def _liger_kernel() -> Any:
    return packages.loaded("liger_kernel.transformers.functional", "liger-kernel", "0.8", "0.9")


def _liger(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head) -> Tensor:
    found: Tensor = _liger_kernel().liger_fused_linear_cross_entropy(
        hidden, weight, labels, bias=bias, ignore_index=head.ignore_index, reduction="sum",
        lse_square_scale=head.terms.z_loss, label_smoothing=head.terms.label_smoothing,
        softcap=head.terms.softcap, accum_dtype=wide(weight.dtype),
    )  # fmt: skip
    return found


def _cut_cross_entropy() -> Any:
    return packages.loaded("cut_cross_entropy", "cut-cross-entropy", "25.1", "26")


def _cce(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, head: Head) -> Tensor:
    found: Tensor = _cut_cross_entropy().linear_cross_entropy(
        hidden,
        weight,
        labels,
        ignore_index=head.ignore_index,
        softcap=head.terms.softcap,
        reduction="sum",
        filter_eps=None,  # by default it leaves small gradients out
    )
    return found


TORCH = _kernel(_torch, _torch_lacks, {"bias"})
LIGER = _kernel(
    _liger, lambda p: _on_cuda(p, _liger_kernel), {"bias", "z_loss", "label_smoothing", "softcap"}
)
CCE = _kernel(_cce, lambda p: _on_cuda(p, _cut_cross_entropy), {"softcap"})
