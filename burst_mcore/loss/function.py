"""The fused LM head and loss, and its autograd function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.dtypes import autocast, wide
from burst_mcore.loss.arguments import LossArguments, LossCall, checked
from burst_mcore.loss.checksums import same_on_all
from burst_mcore.loss.chunked import Needs, Weights, repair
from burst_mcore.loss.chunked import forward as losses_and_gradients
from burst_mcore.loss.products import CACHED_ROWS, blocks

ULPS = 8
"""The tolerance for an upstream gradient equal to c w_i: callers may normalise weights before they scale."""


class Metrics(NamedTuple):
    """Metrics of every token, in the shape of labels, without gradients; 0 or False for ignored labels."""

    log_probability: Tensor
    """The log-probability of the label, without smoothing."""
    entropy: Tensor
    """The entropy of the softmax of the logits, in nats."""
    correct: Tensor
    """Whether the label's logit is the maximum."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_tokens: int | str = "auto",
    grad_weight_dtype: torch.dtype = torch.float32,
    main_grad: Tensor | None = None,
    return_metrics: bool = False,
) -> Tensor | tuple[Tensor, Metrics]:
    """Cross-entropy of an LM head without its N x V logits; gradients in forward, at three products a token.

    The same in plain PyTorch:

        logits = hidden @ weight.T + bias
        z = (logits if softcap is None else softcap * tanh(logits / softcap)) / temperature
        l = cross_entropy(z, labels, label_smoothing=label_smoothing) + z_loss * logsumexp(z) ** 2
        l[labels == ignore_index] = 0
        "none": l        "sum": sum(w * l)        "mean": sum(w * l) / sum(w[labels != ignore_index])

    Gradients are exact for every upstream gradient, and cheap for a scalar times `weights`: for "mean" and
    "sum", and with "none" for a masked sum of the caller's, c * weights (Megatron's contract). With "none",
    tokens with another upstream gradient are computed again, at two products each.

    On CUDA the host waits for the device once in forward, for the checks of labels and weights, and in
    backward of "none". With groups it also waits for exchanges of their ranks: in forward, and with
    `tp_group` in backward. A CUDA graph cannot capture the call.

    Args:
        hidden: [..., d]; float32, bfloat16, float16 or float64. With `sequence_parallel`, this rank's part,
            along the first dim, of the tokens that `labels` has.
        weight: [V, d], of the same dtype. With `tp_group`, this rank's rows: ceil(V / TP) each, in the
            order of ranks, fewer at the end.
        labels: [...], integers in [0, V) or `ignore_index`. The same on all ranks of `tp_group`.
        weights: [...], at least 0 and finite, without a gradient. With "none" they do not weight: they are
            the expected upstream gradients. The same on all ranks of `tp_group`.
        bias: [V], or this rank's.
        ignore_index: The label of tokens without loss, which are not computed.
        reduction: "mean", "sum" or "none". The mean is 0 if all weights are 0.
        z_loss: Factor of logsumexp(z)^2.
        label_smoothing: As in torch's cross_entropy.
        softcap: Cap of the logits.
        temperature: Divisor of the logits.
        tp_group: Ranks that share the vocabulary. All get the same loss, and need the same upstream gradient;
            the gradient of hidden is summed over them.
        cp_group: Ranks that share the sequence: "mean" divides by the weights of all ranks, so that the sum
            of the ranks' means is the mean of the whole sequence. It has no other effect.
        sequence_parallel: hidden is sharded over `tp_group`: it is gathered here, its gradient scattered.
        chunk_tokens: Tokens with logits in memory at a time. With "auto" on a GPU, the number depends on the
            free memory if this process has the whole vocabulary: give a number for bitwise equal runs.
        grad_weight_dtype: The dtype of the weight gradient's sum over tokens: float32 (float64 for float64),
            or the weight's own.
        main_grad: [V, d], or this rank's: backward adds the weight's gradient to it, and autograd gets None
            for the weight.
        return_metrics: Return (loss, `Metrics`).

    Returns:
        The loss in at least float32: a scalar, or of the shape of `labels` with "none".

    Raises:
        ValueError: on every rank of both groups, if an argument of any rank is not as above.
        RuntimeError: in backward with create_graph, as there is no second derivative; or if upstream
            gradients differ between ranks of `tp_group`.

    Source: BurstEngine (SC'25), "sequence-level fusion of LM head and loss", algorithm 3.
    """
    hidden, weight, bias = autocast(hidden, weight, bias)
    terms = {
        "z_loss": z_loss,
        "label_smoothing": label_smoothing,
        "softcap": softcap,
        "temperature": temperature,
    }
    call = checked(
        LossArguments(
            hidden, weight, labels, weights, bias, ignore_index, reduction, terms, tp_group, cp_group,
            sequence_parallel, chunk_tokens, grad_weight_dtype, main_grad, return_metrics,
        )
    )  # fmt: skip
    loss: Tensor
    with torch.autocast(hidden.device.type, enabled=False):
        loss, *metrics = _FusedLoss.apply(hidden, weight, bias, labels, weights, main_grad, call)  # type: ignore[no-untyped-call]
    if not return_metrics:
        return loss
    log_probability, entropy, correct = metrics
    return loss, Metrics(log_probability, entropy, correct.bool())


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor | None,
        main_grad: Tensor | None,
        call: LossCall,
    ) -> tuple[Tensor, ...]:
        of_hidden, of_weight, of_bias, *_ = (needed and call.gradients for needed in ctx.needs_input_grad)
        flat, y = _tokens_of(hidden, call), labels.reshape(-1).long()
        unit, w = _over_a_power_of_two(weights, y != call.ignore_index, wide(hidden.dtype))
        head = call.head(weight, bias, call.valid_tokens)
        needs = Needs(of_hidden, of_weight, of_bias, call.metrics)
        losses, metrics, gradients = losses_and_gradients(flat, y, w, head, needs)
        loss, share = _reduced(losses, y, w, unit, call)
        d_hidden = gradients.hidden
        if d_hidden is not None:
            d_hidden = call.vocabulary.summed(d_hidden, call.sequence_parallel).to(hidden.dtype)
        ctx.call, ctx.main_grad = call, main_grad
        ctx.save_for_backward(
            hidden if call.reduction == "none" and (of_weight or of_bias) else None,
            weight, bias, y, w, share, d_hidden, gradients.weight, gradients.bias,
        )  # fmt: skip
        ctx.shape = hidden.shape
        of_tokens = () if metrics is None else metrics.view(3, *labels.shape).unbind()
        ctx.mark_non_differentiable(*of_tokens)
        ctx.set_materialize_grads(False)
        return (loss.view(labels.shape) if call.reduction == "none" else loss, *of_tokens)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the fused loss has no second derivative: call backward without create_graph")
        if upstream is None:
            return (None,) * 7
        hidden, weight, bias, y, w, share, d_hidden, d_weight, d_bias = ctx.saved_tensors
        call: LossCall = ctx.call
        valid = y != call.ignore_index
        expected = valid.to(upstream.dtype) if w is None else w
        each = upstream.reshape(-1).where(valid, 0.0) if share is None else upstream * share * expected
        if call.vocabulary.group is not None and not same_on_all(call.vocabulary.group, each):
            raise RuntimeError("upstream gradients of a loss differ between ranks of its tp_group")
        c, others = _scalar_and_others(each, expected) if share is None else (upstream * share, None)
        if d_hidden is not None:
            factor = each if w is None else each / Weights.of(w).mantissa
            if call.sequence_parallel:
                factor = call.vocabulary.part(factor)
            d_hidden = (d_hidden * factor[:, None]).to(d_hidden.dtype).view(ctx.shape)
        if others is not None and hidden is not None:
            d_weight, d_bias = (None if x is None else _times(x, c) for x in (d_weight, d_bias))
            tokens, head = _tokens_of(hidden, call)[others], call.head(weight, bias, len(others))
            repair(d_weight, d_bias, tokens, y[others], (each - c * expected)[others], head)
            c = torch.ones_like(c)
        if d_bias is not None:
            d_bias = (d_bias * c).to(bias.dtype)
        if d_weight is not None:
            d_weight = _handed_over(d_weight, c, weight.dtype, ctx.main_grad)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _tokens_of(hidden: Tensor, call: LossCall) -> Tensor:
    """Hidden states [tokens, d] of all tokens that this rank computes."""
    whole = call.vocabulary.gathered(hidden) if call.sequence_parallel else hidden
    return whole.reshape(-1, whole.shape[-1])


def _over_a_power_of_two(
    weights: Tensor | None, valid: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Return (unit, weights [tokens] / unit), for a maximum from 1 to 2, which float16 can represent."""
    if weights is None:
        return None, None
    w = weights.detach().to(dtype).reshape(-1).where(valid, 0.0)
    if w.numel() == 0:
        return w.new_ones(()), w
    largest = w.max()
    unit = torch.where(largest == 0, 1.0, Weights.of(largest).power)
    return unit, w / unit


def _reduced(
    losses: Tensor, y: Tensor, w: Tensor | None, unit: Tensor | None, call: LossCall
) -> tuple[Tensor, Tensor | None]:
    """Return (loss, scale), d loss / d l_i = scale w_i: "sum" has unit, "mean" has unit / sum_i(unit w_i)."""
    if call.reduction == "none":
        return losses, None
    total = losses if w is None else losses * w
    unit = losses.new_ones(()) if unit is None else unit
    if call.reduction == "sum":
        return total.sum() * unit, unit
    valid = y != call.ignore_index
    weights = (valid if w is None else w).sum(dtype=torch.float64) * unit.double()
    if call.cp_group is not None:
        dist.all_reduce(weights, group=call.cp_group)
    share = torch.where(weights == 0, 0.0, unit.double() / weights).to(losses.dtype)
    return torch.where(weights == 0, 0.0, total.sum() * share), share


def _scalar_and_others(each: Tensor, expected: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (c, the tokens with an upstream gradient other than c times the expected, or None).

    c is the median of the ratios, or 0 if fewer tokens are to be repaired then.
    """
    c = torch.nanmedian(torch.where(expected != 0, each / expected, torch.nan)) if len(each) else each.sum()
    c = c.where(c.isfinite(), 0.0)
    near = ULPS * torch.finfo(each.dtype).eps * torch.maximum(each.abs(), (c * expected).abs())
    others = ~((each - c * expected).abs() <= near) | ~each.isfinite()
    rows, nonzero = others.nonzero()[:, 0], (each != 0).nonzero()[:, 0]
    if len(rows) >= len(nonzero):
        c, rows = torch.zeros_like(c), nonzero
    return c, rows if len(rows) else None


def _handed_over(d_weight: Tensor, c: Tensor, dtype: torch.dtype, main_grad: Tensor | None) -> Tensor | None:
    """Add c d_weight to main_grad, or return it in the weight's dtype; without another copy."""
    c, into = c.view(1, 1), main_grad  # of two dims: 16 bits are multiplied as float32
    if into is None:
        reused = dtype == d_weight.dtype and not _graph_is_kept()
        into = d_weight if reused else torch.empty_like(d_weight, dtype=dtype)
    step = CACHED_ROWS if d_weight.device.type == "cpu" else max(1, len(d_weight))
    for rows in blocks(d_weight, step):
        if main_grad is None:
            torch.mul(d_weight[rows], c, out=into[rows])
        else:
            into[rows].addcmul_(d_weight[rows], c)
    return into if main_grad is None else None


def _times(x: Tensor, c: Tensor) -> Tensor:
    """Return c x, in place unless the graph is kept."""
    c = c.view([1] * x.dim()) if x.is_cuda else c  # 16 bits are multiplied as float32; on CPU they are
    return x * c if _graph_is_kept() else x.mul_(c)


def _graph_is_kept() -> bool:
    """Return whether backward was called with retain_graph; True if torch does not say."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())
