"""Log-probabilities and entropies of labels under an LM head, with gradients of both, without its logits.

For policy gradients and distillation, with a different upstream gradient for every token. Forward computes
one chunk's logits at a time and saves three numbers a token; backward recomputes the logits: four products a
token in all, where the fused loss with such gradients takes five.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from burst_mcore.dtypes import autocast, wide
from burst_mcore.loss.arguments import LossArguments, LossCall, checked
from burst_mcore.loss.checksums import same_on_all
from burst_mcore.loss.chunked import Gradients, Head, LogitsChunk, Needs
from burst_mcore.loss.rows import LOW, scaled, slope
from burst_mcore.loss.terms import ENTROPY, LABEL, LSE
from burst_mcore.words import brief


@torch.compiler.disable  # type: ignore[untyped-decorator]
def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor | float = 1.0,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    tp_group: dist.ProcessGroup | None = None,
    chunk_tokens: int | str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return (log-probability of the label, entropy) of every token; 0 where the label is ignored.

    Both are of softmax(z), z = cap(hidden @ weight.T + bias) / temperature, in nats and at least float32,
    and both have gradients.

    Args:
        hidden, weight, labels, bias, ignore_index, softcap, tp_group, chunk_tokens: As
            `fused_linear_cross_entropy` has them.
        temperature: A number above 0, or one for each token, in the shape of labels; that of an ignored label
            is not read. It gets no gradient.

    Raises:
        ValueError: on every rank of tp_group, if an argument of any rank is not as above.
        RuntimeError: in backward if upstream gradients differ between ranks of `tp_group`, or with
            create_graph.
    """
    hidden, weight, bias = autocast(hidden, weight, bias)
    terms: dict[str, Any] = {"z_loss": 0.0, "label_smoothing": 0.0, "softcap": softcap, "temperature": 1.0}
    divisors, wrong = divisors_of(temperature, labels, ignore_index)
    call = checked(
        LossArguments(
            *(hidden, weight, labels, divisors, bias, ignore_index, "none", terms, tp_group),
            chunk_tokens=chunk_tokens,
        ),
        wrong,
    )
    assert divisors is not None
    divisors = divisors.to(wide(hidden.dtype)).reshape(-1)
    with torch.autocast(hidden.device.type, enabled=False):
        both: Tensor = _Statistics.apply(hidden, weight, bias, labels, divisors, call)  # type: ignore[no-untyped-call]
    return both[0].view(labels.shape), both[1].view(labels.shape)


class TokenStats(NamedTuple):
    """Statistics of every token, in the shape of shift_labels, with gradients; 0 for ignored labels."""

    log_probability: Tensor
    """The log-probability of the label."""
    entropy: Tensor
    """The entropy of the softmax of the logits, in nats."""


def statistics_of_call(
    beside: Tensor | float, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, **options: Any
) -> Tensor:
    """Return the statistics [2, tokens] of a model's loss call; `beside` multiplies its own temperature."""
    if options["label_smoothing"]:
        raise ValueError("the model smooths labels: statistics of tokens are those of its logits alone")
    divisors = torch.as_tensor(beside).to(labels.device) * temperature
    others = {name: options[name] for name in ("bias", "tp_group", "ignore_index", "softcap", "chunk_tokens")}
    each = divisors.reshape(-1) if divisors.dim() else divisors
    return torch.stack(token_statistics(hidden, weight, labels, each, **others))


def divisors_of(
    temperature: Tensor | float, labels: Tensor, ignore_index: int = -100
) -> tuple[Tensor | None, str | None]:
    """Return (the temperature of each label, 1 if ignored; None), or (None, the error)."""
    legal = "temperature must be a number, or one for each label"
    try:
        each = torch.as_tensor(temperature, dtype=torch.float64, device=labels.device).detach()
        shape = tuple(labels.shape)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None, f"{legal}, got {brief(temperature)}"
    if each.dim() and each.shape != shape:
        return None, f"{legal}, {shape}, got {tuple(each.shape)}"
    each = each.where(labels != ignore_index, 1.0)  # padding: a batch's column has 0 there
    illegal = each[~((each > 0) & each.isfinite())]
    if len(illegal):
        return None, f"temperature must be finite and above 0, got {illegal[0].item()}"
    return each, None


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        divisors: Tensor,
        call: LossCall,
    ) -> Tensor:
        flat, y = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
        valid, columns = y != call.ignore_index, call.vocabulary.columns(y, call.ignore_index)
        head = replace(call.head(weight, bias, call.valid_tokens), exact=True)
        chunk = LogitsChunk(head, gradients=False)
        statistics = torch.zeros((3, len(y)), dtype=wide(hidden.dtype), device=hidden.device)
        for rows in head.chunks(valid):
            z = scaled(chunk.logits(flat[rows], columns[rows]), head.terms).div_(divisors[rows, None])
            table = call.vocabulary.whole(_statistics(z, columns[rows]))
            statistics[:, rows] = torch.stack([table[LABEL] - table[LSE], table[ENTROPY], table[LSE]])
        ctx.call, ctx.shape = call, hidden.shape
        ctx.save_for_backward(flat, weight, bias, valid, columns, divisors, statistics)
        return statistics[:2].clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("token_statistics has no second derivative: backward without create_graph")
        flat, weight, bias, valid, columns, divisors, table = ctx.saved_tensors
        call: LossCall = ctx.call
        group = call.vocabulary.group
        if group is not None and not same_on_all(group, upstream):
            raise RuntimeError("upstream gradients of token statistics differ between ranks of tp_group")
        head = replace(call.head(weight, bias, call.valid_tokens), exact=True)
        chunk = LogitsChunk(head, gradients=True)
        of_hidden, of_weight, of_bias, *_ = ctx.needs_input_grad
        gradients = Gradients(flat, head, Needs(of_hidden, of_weight, of_bias, metrics=False))
        for rows in head.chunks(valid):
            z = scaled(chunk.logits(flat[rows], columns[rows]), head.terms).div_(divisors[rows, None])
            chunk.gradients.copy_(
                _gradient(z, columns[rows], upstream[:, rows], table[1:, rows], divisors[rows, None], head)
            )
            gradients.add(chunk, rows)
        d_hidden, d_weight, d_bias = gradients.hidden, gradients.weight, gradients.bias
        if d_hidden is not None:
            d_hidden = call.vocabulary.summed(d_hidden, False).to(flat.dtype).view(ctx.shape)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None if d_bias is None else d_bias.to(bias.dtype), None, None, None


def _statistics(z: Tensor, columns: Tensor) -> Tensor:
    """Return the statistics [5, tokens] of a part of the vocabulary, without the total and the maximum."""
    table = z.new_zeros((5, len(z)))
    table[LSE] = z.logsumexp(1)
    log_p = (z - table[LSE][:, None]).clamp_(min=LOW)  # a logit may be -inf
    table[ENTROPY] = -torch.linalg.vecdot(log_p.exp(), log_p)
    rows = (columns >= 0).nonzero()[:, 0]
    table[LABEL, rows] = z[rows, columns[rows]]
    return table


def _gradient(
    z: Tensor, labels: Tensor, upstream: Tensor, statistics: Tensor, divisors: Tensor, head: Head
) -> Tensor:
    """Return the gradient of the logits, from the gradients of log-probability and entropy, [2, tokens].

    With p = softmax(z): d log p_y / dz_j = [j = y] - p_j, and dH / dz_j = -p_j (log p_j + H). statistics: H
    and logsumexp(z), [2, tokens].
    """
    (of_label, of_entropy), (entropy, lse) = upstream.to(z.dtype), statistics
    log_p = (z - lse[:, None]).clamp_(min=LOW)
    d: Tensor = (log_p + entropy[:, None]).mul_(of_entropy[:, None]).add_(of_label[:, None])
    d.mul_(log_p.exp_()).neg_()
    rows = (labels >= 0).nonzero()[:, 0]
    d[rows, labels[rows]] += of_label[rows]
    if head.terms.softcap is not None:
        d.mul_(slope(z.mul_(divisors), head.terms))
    return d.div_(divisors)
